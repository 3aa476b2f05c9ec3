"""A failure here means: a rank that dies leaves the others waiting, or without a word of why."""

from __future__ import annotations

import json
import time
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from processes import Ended, finish, python, start
from ranks import free_port

pytestmark = pytest.mark.slow
each = pytest.mark.parametrize(
    "options",
    [
        {"transport": "torch"},
        pytest.param({"transport": "horovod"}, marks=pytest.mark.horovod),
        {"schedule": "cross_iteration"},
    ],
    ids=["torch", "horovod", "cross_iteration"],
)


def started(**options: Any) -> list[Popen[str]]:
    """Two ranks, started as a scheduler would."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = python("fit.py", json.dumps(options))
    return [start(command, LOCAL_RANK=str(i), NODE_RANK="0", **shared) for i in range(2)]


def assert_explained(survivor: Ended, options: dict[str, str]) -> None:
    """It has ended with an error that says what it waited for, and what to do."""
    assert survivor.code != 0
    assert not survivor.orphans
    said = survivor.output.split("Traceback", 1)[1]
    assert "merge group" in said
    assert "read the other ranks' output first" in said
    if options.get("transport") == "horovod":
        assert "Horovod cannot go on without it" in said


@each
def test_a_killed_rank_ends_the_others_with_a_named_merge_group(
    options: dict[str, str], tmp_path: Path
) -> None:
    """SIGKILL in the middle of training, after the plan."""
    ranks = started(
        trainer={"max_steps": 1_000_000},
        strategy={"planner": "wfbp", "warmup_steps": 2, **options},
        save_dir=str(tmp_path),
    )
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "plan.json").exists():
        assert time.monotonic() < deadline, "no plan was made"
        time.sleep(0.05)
    ranks[1].kill()
    killed_at = time.monotonic()
    survivor = finish(ranks[0], limit_seconds=30.0)
    assert time.monotonic() - killed_at < 20.0
    finish(ranks[1])
    assert_explained(survivor, options)


@each
def test_a_rank_that_raises_ends_the_others(options: dict[str, str]) -> None:
    """An error of one rank's own, whose teardown must not wait for the others, nor they for it."""
    ranks = started(strategy={"planner": "wfbp", "warmup_steps": 2, **options}, raises=1)
    survivor, raised = (finish(rank, limit_seconds=60.0) for rank in ranks)
    assert raised.code != 0
    assert not raised.orphans
    assert "ValueError: rank 1 raises" in raised.output
    assert_explained(survivor, options)
