"""A failure here means: loaders are taken for uneven that are not, or nobody may look at them."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from ranks import train_ranks
from torch import Tensor
from training import assert_same
from uneven import Model, fit, with_join

pytestmark = pytest.mark.slow


class Look(pl.Callback):
    """Has a look at a batch, as a logger of images does."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks

    def _look(self, trainer: pl.Trainer) -> None:
        if trainer.global_rank in self._ranks:
            next(iter(trainer.train_dataloader))  # type: ignore[call-overload]

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._look(trainer)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            self._look(trainer)


class Cycled(Model):
    """Takes a part of its batches from a loader that is shorter on one rank."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step([batch["one"][0] + batch["other"][0]], batch_idx)


def _on_rank(rank: int, counts: tuple[int, int], kwargs: dict[str, Any]) -> dict[str, Any]:
    expected = with_join if kwargs.pop("beside_join", False) else None
    result = fit(rank, counts, **kwargs)
    return result if expected is None else {**result, "expected": expected(rank, counts)}


def on_ranks(counts: tuple[int, int], **kwargs: Any) -> list[dict[str, Any]]:
    return train_ranks(_on_rank, counts, kwargs)


ERROR = {"strategy_kwargs": {"uneven_inputs": "error"}}


@pytest.mark.parametrize("kind", ["stream", "list"])
def test_one_rank_may_look_at_a_batch(kind: str) -> None:
    """The look waits for other ranks, or takes a batch away."""
    plain = on_ranks((4, 4), kind=kind, **ERROR)
    for rank, result in enumerate(on_ranks((4, 4), kind=kind, callbacks=[Look((0,))], **ERROR)):
        assert_same(result["state"], plain[rank]["state"])
        assert result["taken"] == plain[rank]["taken"]


def test_looks_change_nothing_where_ranks_stand_by() -> None:
    """A look begins the count anew, and a batch is taken twice."""
    looks = [Look((0, 1))]
    results = on_ranks((6, 3), kind="stream", callbacks=looks, beside_join=True)
    for rank, result in enumerate(results):
        assert_same(result["state"], result["expected"])
        assert len(result["taken"]) == 2 * (6, 3)[rank]


def test_lengths_beyond_the_end_of_training_do_not_matter() -> None:
    """max_steps comes before a rank would run out."""
    for result in on_ranks((5, 8), kind="sized", max_steps=3, **ERROR):
        assert result["steps"] == 3


def test_estimated_lengths_are_not_believed() -> None:
    """Ranks have as many batches, but say that they have not."""
    for result in on_ranks((4, 4), kind="estimated", **ERROR):
        assert result["steps"] == 8


def test_a_loader_that_is_gone_through_again_and_again() -> None:
    """The shorter of two is counted, which ends no epoch."""
    for result in on_ranks((5, 5), kind="cycled", model=Cycled, **ERROR):
        assert result["steps"] == 10
