"""A failure here means: some way to start training does not reach the same weights."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from processes import Ended, finish, python, run, start
from ranks import free_port

pytestmark = pytest.mark.slow


def results(ended: Ended) -> list[tuple[str, str, str]]:
    """(rank, world size, sum of weights) of every process that printed them."""
    assert ended.code == 0, ended.output[-3000:]
    assert not ended.orphans
    # behind "[0]<stdout>:" where horovodrun prints it
    lines = [
        line.split("RESULT ")[1].split() for line in ended.output.splitlines() if "RESULT " in line
    ]
    return sorted((rank, world, total) for _, rank, world, total in lines)


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


def test_torchrun(expected: str) -> None:
    """Ranks that are started from outside."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    ended = run(torchrun + python("fit.py", options())[1:])
    assert results(ended) == [("0", "2", expected), ("1", "2", expected)]


@pytest.mark.horovod
def test_over_horovod(expected: str) -> None:
    """Horovod carries the gradients, whoever has started the ranks."""
    named = options(trainer={"strategy": "mgwfbp_horovod"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--gloo"]
    for launcher in ([], torchrun, [*horovodrun, sys.executable]):
        program = python("fit.py", named)
        ended = run(launcher + program[1:] if launcher else program)
        assert results(ended) == [("0", "2", expected), ("1", "2", expected)]


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
