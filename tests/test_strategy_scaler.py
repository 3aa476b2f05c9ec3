"""A failure here means: a loss scale, or an overflow, reaches what a compressor leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from ranks import train_ranks
from torch import Tensor
from training import Toy, ToyData, assert_same, make_strategy, quiet_trainer, residual_of, sparse

from lightning_mgwfbp import PowerSGD, TopK

pytestmark = pytest.mark.slow

COMPRESSORS = {
    "topk": TopK(0.1, dense_below_numel=0),
    "momentum": TopK(0.1, dense_below_numel=0, momentum_correction=0.9),
    "powersgd": PowerSGD(dense_below_numel=0),
}
OVERFLOWS_AT = 6


class _ScaledOnly(MixedPrecision):
    """A loss scale without autocast."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        yield


class _Overflows(Toy):
    """At one step of one rank the loss is infinite."""

    def __init__(self, at: int | None, fused: bool) -> None:
        super().__init__()
        self.at = at
        self.fused = fused

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        return loss * torch.inf if batch_idx == self.at and self.global_rank == 1 else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, fused=self.fused)


class _Snapshots(pl.Callback):
    """Weights, rests and loss scale after each step."""

    def __init__(self) -> None:
        self.taken: list[tuple[dict[str, Tensor], dict[str, Tensor], float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = {name: value.clone() for name, value in pl_module.state_dict().items()}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        self.taken.append((state, residual_of(trainer), scale))


def _train(
    rank: int,
    compressor: Any,
    precision: type[MixedPrecision] | None,
    overflows_at: int | None = None,
    fused: bool = False,
) -> Any:
    pl.seed_everything(7, verbose=False)
    snapshots = _Snapshots()
    plugins = []
    if precision is not None:
        # a power of two, growing and halving: scaled and not, gradients have the same bits
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
        plugins = [precision("16-mixed", "cpu", scaler=scaler)]
    trainer = quiet_trainer(
        strategy=make_strategy("mgwfbp", **sparse(compressor)),
        max_steps=12,
        callbacks=[snapshots],
        plugins=plugins,
    )
    trainer.fit(_Overflows(overflows_at, fused), ToyData())
    return snapshots.taken


each = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


@each
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_on_one_rank_is_skipped_by_all(compressor: Any, fused: bool) -> None:
    """The step it happens in: weights and rests are as before, the scale is halved."""
    first, second = train_ranks(_train, compressor, _ScaledOnly, OVERFLOWS_AT, fused)
    for taken in (first, second):
        (state, rests, scale), (next_state, next_rests, next_scale) = taken[
            OVERFLOWS_AT - 1 : OVERFLOWS_AT + 1
        ]
        assert_same(next_state, state)
        assert_same(next_rests, rests)
        assert any(rest.any() for rest in rests.values())
        assert next_scale == scale / 2
    for (ours, _, scale), (theirs, _, other_scale) in zip(first, second, strict=True):
        assert_same(ours, theirs)
        assert scale == other_scale
    assert not torch.equal(first[-1][0]["side.weight"], first[OVERFLOWS_AT][0]["side.weight"])


@each
def test_a_scaled_run_is_the_unscaled_one(compressor: Any) -> None:
    """Rests are kept in unscaled units while the scale grows."""
    scaled, _ = train_ranks(_train, compressor, _ScaledOnly)
    plain, _ = train_ranks(_train, compressor, None)
    assert scaled[-1][2] == 2.0**13
    for (ours, our_rests, _), (theirs, their_rests, _) in zip(scaled, plain, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
        for name, value in their_rests.items():
            torch.testing.assert_close(our_rests[name], value, rtol=1e-5, atol=1e-7)


def test_autocast_to_float16() -> None:
    """Trainer(precision="16-mixed") as it is."""
    first, second = train_ranks(_train, COMPRESSORS["topk"], MixedPrecision)
    assert_same(first[-1][0], second[-1][0])
    assert all(value.isfinite().all() for value in first[-1][0].values())
