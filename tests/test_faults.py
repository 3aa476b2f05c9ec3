"""A failure here means: a rank that dies leaves the others waiting, or without a word of why."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from processes import finish, python, start
from ranks import free_port

pytestmark = pytest.mark.slow


def test_a_killed_rank_ends_the_others_with_a_named_merge_group(tmp_path: Path) -> None:
    """SIGKILL in the middle of training, after the plan."""
    options = {
        "trainer": {"max_steps": 1_000_000},
        "strategy": {"planner": "wfbp", "warmup_steps": 2},
        "save_dir": str(tmp_path),
    }
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [
        start(python("fit.py", json.dumps(options)), LOCAL_RANK=str(i), NODE_RANK="0", **shared)
        for i in range(2)
    ]
    deadline = time.monotonic() + 60.0
    while not (tmp_path / "plan.json").exists():
        assert time.monotonic() < deadline, "no plan was made"
        time.sleep(0.05)
    ranks[1].kill()
    killed_at = time.monotonic()
    survivor = finish(ranks[0], limit_seconds=30.0)
    assert time.monotonic() - killed_at < 20.0
    finish(ranks[1])
    assert survivor.code != 0
    assert not survivor.orphans
    assert "merge group" in survivor.output.split("Traceback", 1)[1]
