"""A small network, trained by MergedOptimizer with each of the compressors that leave rests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.compressors import Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import AlphaBeta

COMPRESSORS = {
    "topk": TopK(0.1, dense_below_numel=20),
    "momentum": TopK(0.1, momentum_correction=0.9, dense_below_numel=20),
    "randomk": RandomK(0.1, dense_below_numel=20),
    "int8": Quantize8(dense_below_numel=20),
}
each = pytest.mark.parametrize("compressor", COMPRESSORS)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    return model


def merged_of(model: nn.Module, transport: Transport, compressor: str, **options: Any) -> Any:
    optimizer = options.pop("optimizer", SGD)(
        model.parameters(), lr=0.125, **options.pop("arguments", {})
    )
    return MergedOptimizer(
        optimizer,
        model.named_parameters(),
        transport=transport,
        compressor=COMPRESSORS.get(compressor),
        # messages cost little to start, and much for each byte: small and sparse ones
        link=AlphaBeta(1e-9, 1.0),
        planner=options.pop("plan", "wfbp"),
        warmup_steps=2,
        **options,
    )


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(101 * step + rank))


def train(
    transport: Transport, compressor: str, steps: int, **options: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Weights, and what this rank has left, after so many steps."""
    model = network()
    merged = merged_of(model, transport, compressor, **options)
    for s in range(steps):
        merged.zero_grad()
        model(batch(transport.rank, s)).square().mean().backward()
        merged.step()
    merged.close()
    left = merged.reducer.exchanger.state_dict()
    return [p.detach() for p in model.parameters()], left.get("residual", {})
