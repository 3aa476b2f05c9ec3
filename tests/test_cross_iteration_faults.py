"""A failure here means: with deferred steps a rank that dies leaves the others waiting."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import finish
from test_faults import assert_explained, started

pytestmark = pytest.mark.slow
CROSS = {"planner": "wfbp", "warmup_steps": 2, "schedule": "cross_iteration"}


def test_a_killed_rank(tmp_path: Path) -> None:
    """SIGKILL while halves are on their way."""
    ranks = started(trainer={"max_steps": 1_000_000}, strategy=CROSS, save_dir=str(tmp_path))
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "plan.json").exists():
        assert time.monotonic() < deadline, "no plan was made"
        time.sleep(0.05)
    ranks[1].kill()
    killed_at = time.monotonic()
    survivor = finish(ranks[0], limit_seconds=30.0)
    assert time.monotonic() - killed_at < 20.0
    finish(ranks[1])
    assert_explained(survivor, "torch")


def test_a_rank_that_raises() -> None:
    """An error of one rank's own, between two halves of a step."""
    survivor, raised = (
        finish(rank, limit_seconds=60.0) for rank in started(strategy=CROSS, raises=1)
    )
    assert raised.code != 0
    assert not raised.orphans
    assert "ValueError: rank 1 raises" in raised.output
    assert_explained(survivor, "torch")
