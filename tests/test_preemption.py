"""A failure here means: after SIGTERM a rank goes on, ends too early, or gives the others up."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from training import quiet_trainer

from lightning_mgwfbp.preemption import Preemption

SILENT = "Rank 1 (on host) has ended, is stopped, or cannot be reached"


@dataclass
class Roll:
    """One whose calls are answered as is said beforehand."""

    missing: list[str]
    told: list[int] = field(default_factory=list)
    end_is_wanted: bool = False
    last_batch: int | None = None

    def want_end(self) -> None:
        raise AssertionError("rank 0 sets the end itself")

    def end_after(self, batch: int) -> str:
        self.told.append(batch)
        self.last_batch = batch
        return self.missing.pop(0)


@pytest.fixture(autouse=True)
def handler_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def preempted(roll: Roll) -> list[bool]:
    """Whether training has ended after each of four batches; SIGTERM comes in the second."""
    trainer = quiet_trainer(devices=1)
    preemption = Preemption(trainer, roll)  # type: ignore[arg-type]
    preemption.begin()
    ended = []
    for batch in range(1, 5):
        preemption.batch_begins()
        if batch == 2:
            signal.raise_signal(signal.SIGTERM)
        preemption.batch_ends()
        ended.append(trainer._signal_connector.received_sigterm)
    return ended


def test_the_last_batch_is_the_one_after_all_have_heard() -> None:
    """The end is told more than once, or not kept to."""
    roll = Roll(missing=[""])
    assert preempted(roll) == [False, False, False, True]
    assert roll.told == [4]


def test_a_rank_that_misses_a_call_is_called_again() -> None:
    """A busy rank, slow to answer, costs the training its checkpoint on the way out."""
    roll = Roll(missing=[SILENT, ""])
    assert preempted(roll) == [False, False, False, True]
    assert roll.told == [4, 4]


def test_a_rank_that_never_answers_is_named() -> None:
    """It is called for ever, or ranks that have not heard of the end are left behind."""
    roll = Roll(missing=[SILENT, SILENT])
    with pytest.raises(RuntimeError, match=r"cannot tell: Rank 1 \(on host\) has ended"):
        preempted(roll)
    assert roll.told == [4, 4]
    assert not roll.missing


def test_another_rank_asks_for_the_end() -> None:
    """Only rank 0's own SIGTERM ends training."""
    roll = Roll(missing=[""], end_is_wanted=True)
    assert preempted(roll) == [False, True, True, True]
    assert roll.told == [2]
