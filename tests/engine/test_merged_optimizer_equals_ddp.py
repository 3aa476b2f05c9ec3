"""A failure here is a bit that differs from DistributedDataParallel's, on two real processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.broadcast import broadcast_parameters


def train(model: nn.Module, optimizer: Optimizer, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def both(rank: int, kind: type[Optimizer], options: dict[str, Any]) -> list[list[Tensor]]:
    torch.manual_seed(rank)  # ranks start apart, rank 0's weights win
    ours = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3))
    theirs = copy.deepcopy(ours)
    broadcast_parameters(ours.named_parameters())
    merged = MergedOptimizer(
        kind(ours.parameters(), **options), ours.named_parameters(), planner="wfbp", warmup_steps=5
    )
    train(ours, merged, rank, steps=20)
    assert merged.plan is not None
    assert len(merged.plan.groups) == 6
    merged.close()
    wrapped = DistributedDataParallel(theirs)
    train(wrapped, kind(theirs.parameters(), **options), rank, steps=20)
    return [[p.detach() for p in m.parameters()] for m in (ours, theirs)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, {"lr": 0.01})],
    ids=["SGD momentum", "Adam"],
)
def test_twenty_steps_across_the_warm_up(kind: type[Optimizer], options: dict[str, Any]) -> None:
    """Some step, during the warm-up or after it, averaged otherwise than DDP does."""
    for ours, theirs in run_ranks(both, kind, options):
        assert all(map(torch.equal, ours, theirs))
