"""A failure here means: a rank or a cable fails, and ranks on other hosts wait, or know nothing."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from processes import Ended, finish, python, start

from benchmarks import netlab

pytestmark = pytest.mark.slow
TIMEOUT = 5.0
GONE = "has ended, is stopped, or cannot be reached: read the other ranks' output first"
NO_STORE = f"Rank 0, or the host that keeps its store, {GONE}"
horovod = pytest.param({"transport": "horovod"}, marks=pytest.mark.horovod, id="horovod")
cross_iteration = pytest.param({"schedule": "cross_iteration"}, id="cross_iteration")
torch = pytest.param({}, id="torch")


@pytest.fixture(scope="module")
def lab() -> Iterator[netlab.Lab]:
    if reason := netlab.unavailable():
        pytest.skip(f"needs hosts made of network namespaces: {reason}")
    with netlab.Lab(hosts=2) as lab:
        yield lab


@contextmanager
def training(lab: netlab.Lab, folder: Path, strategy: dict[str, Any]) -> Iterator[list[Popen[str]]]:
    """One rank on each host, in the middle of a training without end."""
    options = {
        "trainer": {"max_steps": -1, "max_epochs": -1, "num_nodes": 2, "devices": 1},
        "strategy": {"planner": "wfbp", "warmup_steps": 2, **strategy},
        "save_dir": str(folder),
        "timeout": TIMEOUT,
    }
    command = python("fit.py", json.dumps(options))
    ranks = [start(lab.entered(i, command), **lab.environment(i)) for i in range(len(lab.hosts))]
    try:
        deadline = time.monotonic() + 60.0
        while not (folder / "plan.json").exists():
            assert time.monotonic() < deadline, "no plan was made"
            time.sleep(0.05)
        time.sleep(0.2)
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def said(survivor: Popen[str]) -> str:
    """The error with which it ends by itself, soon, leaving nobody behind."""
    ended: Ended = finish(survivor, limit_seconds=TIMEOUT + 10.0)
    assert ended.code != 0
    assert not ended.orphans
    return ended.output.split("Traceback", 1)[1]


@pytest.mark.parametrize("strategy", [torch, horovod, cross_iteration])
def test_a_stopped_rank_is_named(strategy: dict[str, Any], lab: netlab.Lab, tmp_path: Path) -> None:
    """Its connections stay: only the timeout tells, and the roll call who it is."""
    with training(lab, tmp_path, strategy) as ranks:
        ranks[1].send_signal(signal.SIGSTOP)
        assert f"Rank 1 (on {lab.hosts[1]}) {GONE}" in said(ranks[0])


def test_the_others_outlive_a_stopped_rank_0_by_one_timeout(
    lab: netlab.Lab, tmp_path: Path
) -> None:
    """They wait for it in a broadcast of Lightning's, which takes that for nothing."""
    with training(lab, tmp_path, {}) as ranks:
        ranks[0].send_signal(signal.SIGSTOP)
        assert NO_STORE in said(ranks[1])


@pytest.mark.parametrize("strategy", [torch, horovod])
def test_a_cut_link_ends_both_sides(
    strategy: dict[str, Any], lab: netlab.Lab, tmp_path: Path
) -> None:
    """Neither hears of the other any more, nor does one of them of the store."""
    with training(lab, tmp_path, strategy) as ranks:
        lab.cut(1)
        try:
            errors = [said(rank) for rank in ranks]
        finally:
            lab.mend(1)
    assert f"Rank 1 (on {lab.hosts[1]}) {GONE}" in errors[0]
    assert NO_STORE in errors[1]
