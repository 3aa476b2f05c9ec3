"""A failure here means: a save that was cut short has cost the checkpoint before it."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run

from lightning_mgwfbp.checkpoint_file import WholeCheckpointIO

LIMIT_BYTES = 100_000  # of a file, in the middle of what `large` makes
OLD = {"epoch": 1, "weights": torch.arange(6.0).view(2, 3)}

KILLED_WHILE_IT_SAVES = f"""
import resource, signal, sys, torch
from lightning_mgwfbp.checkpoint_file import WholeCheckpointIO

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which ends the process that writes
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, ({LIMIT_BYTES}, {LIMIT_BYTES}))
WholeCheckpointIO().save_checkpoint({{"weights": torch.ones(100_000)}}, sys.argv[1])
"""


class Interrupting:
    """Cannot be saved."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def large() -> dict[str, Any]:
    return {"epoch": 2, "weights": torch.ones(100_000)}


def saved(folder: Path) -> Path:
    """The file of `OLD`."""
    path = folder / "last.ckpt"
    WholeCheckpointIO().save_checkpoint(OLD, path)
    return path


def assert_holds(path: Path, checkpoint: dict[str, Any]) -> None:
    loaded = torch.load(path, weights_only=True)
    assert loaded["epoch"] == checkpoint["epoch"]
    assert torch.equal(loaded["weights"], checkpoint["weights"])


@contextmanager
def files_limited() -> Iterator[None]:
    """As on a full disk: no file grows beyond the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_checkpoint_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    """The new one is not under its name, or something is left beside it."""
    path = saved(tmp_path / "made" / "for it")
    assert_holds(path, OLD)
    WholeCheckpointIO().save_checkpoint(large(), str(path))
    assert_holds(path, large())
    assert list(path.parent.iterdir()) == [path]


def test_the_disk_is_full(tmp_path: Path) -> None:
    """The old one has been overwritten, or a part fills the disk for ever."""
    path = saved(tmp_path)
    with files_limited(), pytest.raises((OSError, RuntimeError)):
        WholeCheckpointIO().save_checkpoint(large(), path)
    assert_holds(path, OLD)
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted(tmp_path: Path) -> None:
    """What is no Exception leaves a part behind."""
    path = saved(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        WholeCheckpointIO().save_checkpoint({**large(), "last": Interrupting()}, path)
    assert_holds(path, OLD)
    assert list(tmp_path.iterdir()) == [path]


def test_killed(tmp_path: Path) -> None:
    """The old one has been overwritten, or parts pile up with each kill."""
    path = saved(tmp_path)
    ended = run([sys.executable, "-c", KILLED_WHILE_IT_SAVES, str(path)])
    assert ended.code == -signal.SIGXFSZ, ended.output
    assert_holds(path, OLD)
    (part,) = set(tmp_path.iterdir()) - {path}
    assert 0 < part.stat().st_size <= LIMIT_BYTES
    WholeCheckpointIO().save_checkpoint(large(), path)
    assert_holds(path, large())
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_a_local_path_is_lightnings(tmp_path: Path) -> None:
    """An address is taken for a path, or storage options are swallowed."""
    path = tmp_path / "last.ckpt"
    WholeCheckpointIO().save_checkpoint(OLD, f"file://{path}")
    assert_holds(path, OLD)
    with pytest.raises(TypeError, match="storage_options"):
        WholeCheckpointIO().save_checkpoint(OLD, path, storage_options={})
