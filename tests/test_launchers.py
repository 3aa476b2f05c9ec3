"""A failure here means: some way to start training does not reach the same weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Ended, finish, python, run, start
from ranks import free_port

from benchmarks import netlab
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod

pytestmark = pytest.mark.slow


def results(ended: Ended) -> list[tuple[str, str, str]]:
    """(rank, world size, sum of weights) of every process that printed them."""
    assert ended.code == 0, ended.output[-3000:]
    assert not ended.orphans
    return printed(ended.output)


def printed(output: str) -> list[tuple[str, str, str]]:
    # between "[0]<stdout>:" and its like where horovodrun passes it on
    return sorted(re.findall(r"RESULT \d+ (\d+) (\d+) (-?\d+\.\d+)", output))


def options(**given: Any) -> str:
    return json.dumps(given)


@pytest.fixture(scope="module")
def expected() -> str:
    """The sum of weights that Lightning's own launcher and strategy "ddp" lead to."""
    ended = run(python("fit.py", options(trainer={"strategy": "ddp"})))
    (_, _, total), (_, _, other) = results(ended)
    assert total == other
    return total


def test_lightnings_own_launcher(expected: str) -> None:
    """Trainer(devices=2) starts the other rank itself."""
    assert results(run(python("fit.py", options()))) == [("0", "2", expected), ("1", "2", expected)]


@pytest.mark.parametrize("name", ["mgwfbp_spawn", "mgwfbp_fork"])
def test_spawn_and_fork(name: str, expected: str) -> None:
    """Weights come back to the process that called fit."""
    ended = run(python("fit.py", options(trainer={"strategy": name})))
    assert results(ended) == [("0", "2", expected)]


def before(launcher: str) -> list[str]:
    """The words before `python program.py` that have two processes run it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", "2"]
    return {
        "Lightning": [],
        "torchrun": [*torchrun, "--master-addr=127.0.0.1", f"--master-port={free_port()}"],
        "horovodrun": [*horovodrun, "--gloo"],
        "horovodrun --mpi": [*horovodrun, "--mpi"],
        "mpirun": ["mpirun", "-np", "2", "--allow-run-as-root"],
    }[launcher]


def test_torchrun(expected: str) -> None:
    """Ranks that are started from outside."""
    ended = run(before("torchrun") + python("fit.py", options()))
    assert results(ended) == [("0", "2", expected), ("1", "2", expected)]


def skip_without_mpi() -> None:
    if not load_horovod().mpi_built():
        pytest.skip("Horovod has no MPI: HOROVOD_WITH_MPI=1 scripts/install_horovod.sh builds it")
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun not found (on Debian: apt install openmpi-bin)")


@pytest.mark.horovod
@pytest.mark.parametrize(
    "launcher", ["Lightning", "torchrun", "horovodrun", "horovodrun --mpi", "mpirun"]
)
def test_over_horovod(launcher: str, expected: str, tmp_path: Path) -> None:
    """Horovod carries the gradients; Lightning's ranks, samplers, metrics and collectives stay."""
    if "mpi" in launcher:
        skip_without_mpi()
    ended = run(before(launcher) + python("fit_over_horovod.py", options(), str(tmp_path)))
    assert results(ended) == [("0", "2", expected), ("1", "2", expected)]


# `ssh [-o OPTION] HOST [-o OPTION] COMMAND` between the hosts of a `Lab`
SSH = """#!/bin/sh
while :; do
  case $1 in
    -o) shift 2 ;;
    lab*) host=$1; shift ;;
    *) break ;;
  esac
done
exec ip netns exec "$host" unshare --uts sh -c 'hostname "$0"; eval "$*"' "$host" "$@"
"""


@pytest.mark.horovod
@pytest.mark.parametrize("launcher", ["environment", "horovodrun"])
def test_over_horovod_on_two_hosts(
    launcher: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """num_nodes=2: addresses by which hosts find each other, local and cross ranks."""
    if reason := netlab.unavailable():
        pytest.skip(f"needs hosts made of network namespaces: {reason}")
    (tmp_path / "ranks").mkdir()
    two_hosts = options(trainer={"num_nodes": 2, "devices": 1})
    program = python("fit_over_horovod.py", two_hosts, str(tmp_path / "ranks"))
    with netlab.Lab(hosts=2) as lab:
        commands = [program, program]
        if launcher == "horovodrun":
            ssh = tmp_path / "ssh"
            ssh.write_text(SSH)
            ssh.chmod(0o755)
            monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            hosts = ["-H", ",".join(f"{host}:1" for host in lab.hosts), "--disable-cache"]
            network = ["--network-interface", "veth0"]
            commands = [[*before("horovodrun"), *hosts, *network, *program], ["true"]]
        output = "\n".join(lab.run(commands, timeout=90))
    assert printed(output) == [("0", "2", expected), ("1", "2", expected)]


def test_two_nodes(expected: str) -> None:
    """num_nodes=2 with one process each."""
    command = python("fit.py", options(trainer={"num_nodes": 2, "devices": 1}))
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [start(command, NODE_RANK=str(node), **shared) for node in range(2)]
    ended = [finish(node) for node in nodes]
    assert [results(e)[0] for e in ended] == [("0", "2", expected), ("1", "2", expected)]


def test_slurm(expected: str) -> None:
    """Ranks that srun started, as SLURM's variables describe them."""
    command = python("fit.py", options(trainer={"devices": 2}))
    shared = {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [start(command, SLURM_PROCID=str(i), SLURM_LOCALID=str(i), **shared) for i in range(2)]
    ended = [finish(task) for task in tasks]
    assert [results(e)[0] for e in ended] == [("0", "2", expected), ("1", "2", expected)]


def test_one_device_says_so_once() -> None:
    """Nothing to exchange: plain training on the distributed sampler's order."""
    mgwfbp = run(python("fit.py", options(trainer={"devices": 1})))
    ddp = run(python("fit.py", options(trainer={"devices": 1, "strategy": "ddp"})))
    assert results(mgwfbp) == results(ddp)
    assert mgwfbp.output.count("nothing to exchange") == 1
