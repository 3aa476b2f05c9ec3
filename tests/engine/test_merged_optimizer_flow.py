"""A failure here is a gradient that survives zero_grad, or a step on one rank's own gradients."""

import copy

import pytest
from engine_examples import (
    Gradients,
    Layers,
    assert_close,
    averages,
    backward,
    data_of,
    gradients,
    merge,
    plus,
    reducer_of,
    step,
)
from loopback import on_ranks

from lightning_mgwfbp.exchange.transport import LoopbackTransport


def test_zero_grad_clears_what_is_on_its_way() -> None:
    """Gradients that the user threw away after a backward come back with the next exchange."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        optimizer = merge(ours, transport, lr=0.0)
        for s in range(4):
            backward(ours, data_of(rank, s))
            optimizer.step()
            optimizer.zero_grad()
        backward(ours, data_of(rank, 5))
        optimizer.zero_grad()
        backward(ours, data_of(rank, 6))
        optimizer.synchronize()
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, averages(model, 6))


def test_a_step_exchanges_what_came_after_synchronize() -> None:
    """A backward under no_sync between synchronize() and step() makes the ranks diverge."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        optimizer = merge(ours, transport, lr=0.0)
        backward(ours, data_of(rank, 1))
        optimizer.synchronize()
        with optimizer.no_sync():
            backward(ours, data_of(rank, 2))
        optimizer.step()
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, plus(averages(model, 1), averages(model, 2)))


def test_a_broken_promise_of_a_static_graph_is_an_error() -> None:
    """Gradients of a parameter that was frozen when the plan was made are silently lost."""

    def train(transport: LoopbackTransport) -> str:
        ours = Layers()
        ours.layers[0].requires_grad_(False)
        reducer = reducer_of(ours, transport, 2, 2, static_graph=True)
        ours.layers[0].requires_grad_(True)
        with pytest.raises(RuntimeError, match="static_graph=True") as error:
            step(ours, reducer, transport.rank, 0)
        return str(error.value)

    first, second = on_ranks(train)
    assert first == second
