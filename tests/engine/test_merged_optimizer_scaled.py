"""A failure here is a loss scale that reaches rests, or an overflow that only some ranks see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from network_examples import batch, each, merged_of, network, train
from torch import Tensor
from torch.optim import Adam

from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport


class Scaled:
    """Mixed precision's loop, as PyTorch's documentation has it, with and without unscaling."""

    def __init__(self, transport: Transport, compressor: str, **options: Any) -> None:
        self.rank = transport.rank
        self.model = network()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        self.merged = merged_of(
            self.model, transport, compressor, grad_scaler=self.scaler, **options
        )

    def step(self, step: int, overflow: bool = False) -> None:
        self.merged.zero_grad()
        loss = self.model(batch(self.rank, step)).square().mean()
        self.scaler.scale(loss * (torch.inf if overflow else 1.0)).backward()
        if step % 2:
            self.merged.synchronize()
            self.scaler.unscale_(self.merged)
        self.scaler.step(self.merged)
        self.scaler.update()

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def left(self) -> dict[str, Any]:
        return self.merged.reducer.exchanger.state_dict()


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {},
    "fused SGD": {"arguments": {"fused": True}},
    "fused Adam": {"optimizer": Adam, "arguments": {"fused": True}},
}


@each
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_overflow_on_one_rank_skips_the_step_on_all(compressor: str, kind: str) -> None:
    """Ranks decide differently, or the skipped step's gradients come back with the rests."""
    if compressor == "momentum" and kind == "fused Adam":
        return

    def run(transport: LoopbackTransport) -> list[Tensor]:
        scaled = Scaled(transport, compressor, **OPTIMIZERS[kind])
        for s in range(4):
            scaled.step(s)
        weights, left, scale = scaled.weights, scaled.left, scaled.scaler.get_scale()
        scaled.step(4, overflow=transport.rank == 1)
        assert all(map(same_bits, scaled.weights, weights))
        assert scaled.scaler.get_scale() == scale / 2
        assert left["residual"]
        for kind_of_rest in left.keys() - {"step"}:
            for n, rest in left[kind_of_rest].items():
                assert same_bits(scaled.left[kind_of_rest][n], rest), n
        scaled.step(5)
        assert not any(map(torch.equal, scaled.weights, weights))
        return scaled.weights

    ours, theirs = on_ranks(run)
    assert all(map(same_bits, ours, theirs))


@each
@pytest.mark.parametrize("kind", ["SGD", "fused SGD"])
def test_the_loss_scale_changes_nothing(compressor: str, kind: str) -> None:
    """Rests are kept in the units of a scale that has changed since."""

    def run(transport: LoopbackTransport) -> list[Tensor]:
        scaled = Scaled(transport, compressor, **OPTIMIZERS[kind])
        for s in range(8):
            scaled.step(s)
        assert scaled.scaler.get_scale() == 2.0**14
        return scaled.weights

    for ours, (theirs, _) in zip(on_ranks(run), on_ranks(train, compressor, 8), strict=True):
        for p, other in zip(ours, theirs, strict=True):  # scales are powers of two
            torch.testing.assert_close(p, other, rtol=1e-6, atol=1e-7)
