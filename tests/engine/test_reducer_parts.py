"""A failure here is a gradient that comes in parts, of which one is lost or averaged twice.

Each test names one such case; all of them together, at random, are in test_reducer_property.py.
"""

import copy

import pytest
import torch
from engine_examples import (
    ALL,
    Gradients,
    Layers,
    assert_close,
    averages,
    backward,
    data_of,
    gradients,
    mean,
    plain,
    plus,
    reducer_of,
    step,
)
from loopback import on_ranks, record_keys
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mgwfbp.exchange.transport import LoopbackTransport


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("other", [ALL, (0,)], ids=["used on one rank", "unused on all"])
def test_unused_parameters(other: tuple[int, ...], set_to_none: bool) -> None:
    """What no rank used gets a gradient, or what one rank used gets none on the others."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 1, 4, 1)
        for s in range(3):
            step(ours, reducer, rank, s)
            ours.zero_grad(set_to_none)
        step(ours, reducer, rank, 9, used=other if rank else (0,))
        return gradients(ours)

    used = [(0,), other]
    new = mean([plain(model, (data_of(rank, 9), used[rank])) for rank in range(2)])
    zeros: Gradients = {
        n: None if set_to_none else torch.zeros_like(p) for n, p in model.named_parameters()
    }
    for seen in on_ranks(train):
        assert_close(seen, plus(zeros, new))


@pytest.mark.parametrize("same_graph", [True, False], ids=["double backward", "two graphs"])
def test_late_parts_are_averaged_too(same_graph: bool) -> None:
    """What a second backward adds to a bucket that is on its way is lost, or stays local."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 2, 2, 2)
        for s in range(2):
            step(ours, reducer, rank, s)
            ours.zero_grad()
        loss = ours(data_of(rank, 5), ALL)
        loss.backward(retain_graph=same_graph)
        again = loss if same_graph else ours(data_of(rank, 5), ALL)
        again.backward()
        reducer.synchronize()
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, plus(averages(model, 5), averages(model, 5)))


def test_a_late_part_under_no_sync_is_averaged_too() -> None:
    """The same, for a backward under no_sync while buckets are on their way."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 2, 2, 2)
        for s in range(2):
            step(ours, reducer, rank, s)
            ours.zero_grad()
        backward(ours, data_of(rank, 5))
        with reducer.no_sync():
            backward(ours, data_of(rank, 6))
        reducer.synchronize()
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, plus(averages(model, 5), averages(model, 6)))


def test_discarded_gradients_leave_none() -> None:
    """Accumulation that zero_grad threw away makes zeros of an unused parameter's None."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 2, 2, 2)
        with reducer.no_sync():
            backward(ours, data_of(rank, 1))
        ours.zero_grad()
        step(ours, reducer, rank, 2, used=(1,))
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, averages(model, 2, used=(1,)))


class Shared(nn.Module):
    """One block used twice, each time recomputed within backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 3, dtype=torch.float64)
        self.block = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, data: Tensor) -> Tensor:
        hidden = self.stem(data)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=True).tanh()
        return hidden.square().mean()


def test_a_block_that_fires_twice_in_one_backward() -> None:
    """A shared, re-entrantly recomputed block is sent after its first firing only."""
    model = Shared()

    def train(transport: LoopbackTransport) -> list[Gradients]:
        ours = copy.deepcopy(model)
        reducer = reducer_of(ours, transport, 1, 1, 2)
        keys = record_keys(transport)
        seen = []
        for s in range(3):
            ours.zero_grad()
            ours(data_of(transport.rank, s)).backward()
            reducer.synchronize()
            seen.append(gradients(ours))
        # nothing was late: the second firing is waited for
        assert keys == ["bucket 0", "bucket 1", "bucket 2"] * 3
        return seen

    def alone(rank: int, seed: int) -> Gradients:
        single = copy.deepcopy(model)
        single(data_of(rank, seed)).backward()
        return gradients(single)

    for seen in on_ranks(train):
        for s, ours in enumerate(seen):
            assert_close(ours, mean([alone(rank, s) for rank in range(2)]))
