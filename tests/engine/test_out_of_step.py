"""A failure here means: one rank's gradients of one step meet another's of the next, unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_examples import Layers, backward, data_of
from loopback import on_ranks
from torch import nn

from lightning_mgwfbp import AlphaBeta, MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport


def train(transport: LoopbackTransport, strays: tuple[int, ...], dtype: torch.dtype) -> int:
    """Steps of which each has an exchange, and the fourth another one on ranks in `strays`."""
    model = nn.Linear(3, 1, dtype=dtype)
    nn.init.ones_(model.weight)  # threads draw in any order
    nn.init.ones_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    merged = MergedOptimizer(
        optimizer, model.named_parameters(), transport=transport, link=AlphaBeta(1e-3, 1e-9)
    )
    data = torch.ones(2, 3, dtype=dtype)
    for step in range(8):
        merged.zero_grad()
        model(data).mean().backward()
        merged.synchronize()
        if step == 3 and transport.rank in strays:
            model(data).mean().backward()
        merged.step()
    return merged.reducer.exchanges


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("stray", [0, 1])
def test_a_backward_that_only_one_rank_has_called(stray: int, world_size: int) -> None:
    """Its exchange met the others' next one, and all trained on."""
    with pytest.raises(RuntimeError, match="The ranks are out of step"):
        on_ranks(train, (stray,), torch.float32, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_that_all_have_called(dtype: torch.dtype, world_size: int) -> None:
    """A step with two exchanges is taken for ranks out of step."""
    everyone = tuple(range(world_size))
    assert on_ranks(train, everyone, dtype, world_size=world_size) == [9] * world_size


def leave_out(transport: LoopbackTransport, stray: int, options: dict[str, Any]) -> None:
    """Steps of which rank `stray` leaves out the fourth."""
    model = Layers()
    merged = MergedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        transport=transport,
        planner="single",
        link=AlphaBeta(1e-6, 1e-3),
        warmup_steps=1,
        module=model,
        **options,
    )
    try:
        for step in range(6):
            merged.zero_grad()
            backward(model, data_of(transport.rank, step))
            if step != 3 or transport.rank != stray:
                merged.step()
    finally:
        merged.close()


@pytest.mark.parametrize("stray", [0, 1])
@pytest.mark.parametrize("every", [None, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
def test_a_step_that_only_one_rank_leaves_out(schedule: str, every: int, stray: int) -> None:
    """Ranks wait for what stands for the weights of one that does not send it."""
    options = {"schedule": schedule, "detect_divergence_every_n_steps": every}
    with pytest.raises(RuntimeError, match="The ranks are out of step"):
        on_ranks(leave_out, stray, options, timeout_seconds=10.0)


def test_a_step_left_out_of_a_static_graph() -> None:
    """Where no tail is read, ranks that compare weights wait for one that is elsewhere, or say of
    the weights of different steps that something has changed them."""
    options = {"static_graph": True, "detect_divergence_every_n_steps": 2}
    said = "The ranks are out of step: rank 1 has taken 3 steps, rank 0 4"
    with pytest.raises(RuntimeError, match=said):
        on_ranks(leave_out, 1, options, timeout_seconds=10.0)
