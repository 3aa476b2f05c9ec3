"""A failure here means: a training that was cut off does not go on as if it had not been."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Ended, python, run
from ranks import free_port

pytestmark = pytest.mark.slow
TOPK = {"compressor": "topk"}


def started_by_torchrun(
    folder: Path, *before: str, fault: str | None = None, restarts: int = 0, **strategy: Any
) -> Ended:
    """Four epochs with a checkpoint after each, resumed from the last one after a fault."""
    options: dict[str, Any] = {"strategy": strategy, "timeout": 8.0}
    if fault is not None:
        options["fault"] = fault
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    where += ["--local-addr=127.0.0.1"]
    program = python("resume.py", str(folder), f"{folder} marker", json.dumps(options))
    # otherwise torch 2.13 keeps one store, where new ranks find the addresses of those before them
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run([*before, *torchrun, f"--max-restarts={restarts}", *where, *program], **fresh)


def weights(ended: Ended) -> str:
    """The sum of weights, the same on both ranks."""
    assert ended.code == 0, ended.output[-3000:]
    assert not ended.orphans
    first, second = re.findall(r"RESULT \d+ \d+ 2 (-?\d+\.\d+)", ended.output)
    assert first == second
    return str(first)


def weights_after(fault: str, folder: Path, *before: str, **strategy: Any) -> str:
    ended = started_by_torchrun(folder, *before, fault=fault, restarts=1, **strategy)
    assert "Restored all states from the checkpoint" in ended.output, ended.output[-5000:]
    return weights(ended)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(started_by_torchrun(tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="module")
def undisturbed_topk(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(started_by_torchrun(tmp_path_factory.mktemp("undisturbed"), **TOPK))


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param({}, id="torch"),
        pytest.param({"schedule": "cross_iteration"}, id="cross_iteration"),
        pytest.param({"transport": "horovod"}, marks=pytest.mark.horovod, id="horovod"),
    ],
)
def test_a_killed_rank(strategy: dict[str, str], undisturbed: str, tmp_path: Path) -> None:
    """From the last epoch's checkpoint all ranks reach the same bits."""
    assert weights_after("kill", tmp_path, **strategy) == undisturbed


def test_a_killed_rank_had_residuals(undisturbed_topk: str, tmp_path: Path) -> None:
    """They are in the checkpoint, too."""
    assert weights_after("kill", tmp_path, **TOPK) == undisturbed_topk


@pytest.mark.parametrize("way", ["torch", "topk", "cross_iteration"])
def test_preempted(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """SIGTERM on one rank ends all after one batch, with a checkpoint of the middle of an epoch."""
    strategy = {"torch": {}, "topk": TOPK, "cross_iteration": {"schedule": "cross_iteration"}}[way]
    ended = started_by_torchrun(tmp_path, fault="terminate", **strategy)
    assert "RESULT" not in ended.output, ended.output[-5000:]
    expected = "undisturbed_topk" if way == "topk" else "undisturbed"
    reached = weights_after("terminate", tmp_path, **strategy)
    assert reached == request.getfixturevalue(expected)


def test_killed_while_a_checkpoint_is_written(undisturbed_topk: str, tmp_path: Path) -> None:
    """The one before it is whole, and the one to resume from."""
    assert weights_after("cut_short", tmp_path, **TOPK) == undisturbed_topk


def why_no_mounts() -> str:
    if shutil.which("unshare") is None:
        return "unshare not found (on Debian: apt install util-linux)"
    if os.geteuid() != 0:
        return "mounting needs root"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    return "this container may not mount (it lacks CAP_SYS_ADMIN)" if tried.returncode else ""


def test_the_disk_is_full(undisturbed_topk: str, tmp_path: Path) -> None:
    """As when it was killed: what could not be written whole has not taken a whole one's place."""
    if reason := why_no_mounts():
        pytest.skip(f"needs a small file system: {reason}")
    mount = 'mount -t tmpfs -o size=400k tmpfs "$0" && exec "$@"'  # gone with the namespace
    before = ["unshare", "--mount", "sh", "-c", mount, str(tmp_path)]
    assert weights_after("fill", tmp_path, *before, **TOPK) == undisturbed_topk
