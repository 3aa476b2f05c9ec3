"""A failure here is a gradient that survives zero_grad, or a step on one rank's own gradients."""

import copy

import pytest
import torch
from engine_examples import (
    Gradients,
    Layers,
    assert_close,
    averages,
    backward,
    data_of,
    gradients,
    mean,
    merge,
    plain,
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


@pytest.mark.parametrize("how", ["step", "zero_grad", "synchronize, zero_grad"])
def test_a_rank_without_gradients_comes_to_the_next_exchange(how: str) -> None:
    """Averages that were thrown away pass for those of the next step: a rank waits for ever."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        optimizer = merge(ours, transport, lr=0.0)
        backward(ours, data_of(rank, 1))
        if how == "step":
            optimizer.step()
        elif how.startswith("synchronize"):
            optimizer.synchronize()
        optimizer.zero_grad()
        backward(ours, data_of(rank, 2), (0, 1, 2) if rank else ())
        optimizer.step()
        return gradients(ours)

    expected = plain(model, (data_of(1, 2), (0, 1, 2)))
    for seen in on_ranks(train, timeout_seconds=5.0):
        assert_close(seen, mean([dict.fromkeys(expected), expected]))


def test_gradients_that_one_rank_alone_throws_away_are_an_error() -> None:
    """They meet the other's gradients of the next step, and both train on with the mean."""

    def train(transport: LoopbackTransport) -> None:
        ours, rank = Layers(), transport.rank
        optimizer = merge(ours, transport, lr=0.0)
        if rank == 0:
            backward(ours, data_of(rank, 0))
        for s in range(3):
            optimizer.zero_grad()
            backward(ours, data_of(rank, s))
            optimizer.step()

    with pytest.raises(RuntimeError, match="out of step"):
        on_ranks(train, timeout_seconds=5.0)


def test_zero_grad_finds_gradients_of_what_was_frozen() -> None:
    """On the rank that has no others it is not collective: the next rank waits for ever."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        ours.layers[0].requires_grad_(False)
        optimizer = merge(ours, transport, lr=0.0)
        ours.layers[0].requires_grad_(True)
        backward(ours, data_of(rank, 1), (0, 1, 2) if rank else (0,))
        optimizer.zero_grad()
        backward(ours, data_of(rank, 2))
        optimizer.step()
        return gradients(ours)

    for seen in on_ranks(train, timeout_seconds=5.0):
        assert_close(seen, averages(model, 2))


def test_a_scaler_steps_a_rank_without_gradients() -> None:
    """It looks for gradients before the averages are there, and finds none."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        scaler = torch.amp.GradScaler("cpu", 2.0)
        optimizer = merge(ours, transport, lr=0.0)
        if rank:
            scaler.scale(ours(data_of(rank, 1), (0, 1, 2))).backward()
        else:
            scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        return gradients(ours)

    expected = plain(model, (data_of(1, 1), (0, 1, 2)))
    for seen in on_ranks(train, timeout_seconds=5.0):
        assert_close(seen, mean([dict.fromkeys(expected), expected]))


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
