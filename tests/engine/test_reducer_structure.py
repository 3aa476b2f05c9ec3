"""A failure here is a parameter that joins the exchange, or leaves it, unnoticed or too often."""

import copy

import pytest
from engine_examples import (
    ALL,
    Gradients,
    Layers,
    assert_close,
    averages,
    data_of,
    gradients,
    mean,
    plain,
    plan_of,
    reducer_of,
    step,
)
from loopback import on_ranks

from lightning_mgwfbp.exchange.transport import LoopbackTransport


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_a_parameter_unfrozen_later_joins(ranks: tuple[int, ...]) -> None:
    """The gradients of a parameter that was frozen at first are never averaged."""
    model = Layers()
    model.layers[0].requires_grad_(False)

    def train(transport: LoopbackTransport) -> list[Gradients]:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 2, 2)
        seen = []
        for s in range(4):
            if s == 1 and rank in ranks:
                ours.layers[0].requires_grad_(True)
            ours.zero_grad()
            step(ours, reducer, rank, s)
            assert ("layers.0.bias" in reducer.plan.names) == (s >= 1)
            assert reducer.known.version == (s >= 1)
            seen.append(gradients(ours))
        assert [b - a for a, b in reducer.plan.groups] == [2, 2, 2]  # behind the planned groups
        return seen

    for seen in on_ranks(train):
        for s, ours in enumerate(seen):
            alone = [
                plain(model, (data_of(rank, s), ALL if s and rank in ranks else (1, 2)))
                for rank in range(2)
            ]
            assert_close(ours, mean(alone))


def test_a_parameter_that_joins_unused_has_no_gradient() -> None:
    """Joining makes zeros of an unused parameter's None, which weight decay would act on."""
    model = Layers()

    def train(transport: LoopbackTransport) -> list[Gradients]:
        ours, rank = copy.deepcopy(model), transport.rank
        ours.layers[0].requires_grad_(False)
        reducer = reducer_of(ours, transport, 2, 2)
        ours.layers[0].requires_grad_(True)
        seen = []
        for s in range(2):
            ours.zero_grad()
            step(ours, reducer, rank, s, used=(1, 2))
            seen.append(gradients(ours))
        return seen

    for seen in on_ranks(train):
        for s, ours in enumerate(seen):
            assert_close(ours, averages(model, s, used=(1, 2)))


def test_a_parameter_frozen_for_long_leaves_and_may_come_back() -> None:
    """A frozen parameter travels for ever, or its return is not noticed."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        ours, rank = copy.deepcopy(model), transport.rank
        reducer = reducer_of(ours, transport, 2, 2, 2)
        step(ours, reducer, rank, 0)
        ours.layers[1].requires_grad_(False)
        versions = []
        for s in range(105):
            ours.zero_grad()
            step(ours, reducer, rank, s)
            versions.append(reducer.known.version)
        assert sorted(set(versions)) == [0, 1]
        assert versions.index(1) == 100
        assert reducer.plan.names == plan_of(ours, 4).names
        assert reducer.plan.groups == ((0, 2), (2, 4))
        ours.layers[1].requires_grad_(True)
        for s in range(3):
            ours.zero_grad()
            step(ours, reducer, rank, s)
        assert reducer.known.version == 2
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, averages(model, 2))


def test_toggling_does_not_rebuild() -> None:
    """Models with two optimizers, which freeze each other's parameters, re-plan all the time."""

    def train(transport: LoopbackTransport) -> None:
        model = Layers()
        reducer = reducer_of(model, transport, 2, 2, 2)
        for s in range(210):
            model.layers[0].requires_grad_(s % 2 == 0)
            model.layers[1].requires_grad_(s % 2 == 1)
            model.zero_grad()
            step(model, reducer, transport.rank, s)
        assert reducer.known.version == 0
        assert reducer.plan.names == plan_of(Layers(), 6).names

    on_ranks(train)


def test_a_frozen_parameter_keeps_its_gradient() -> None:
    """An old gradient of a parameter that is frozen now is averaged again, or dropped."""

    def train(transport: LoopbackTransport) -> tuple[Gradients, Gradients]:
        model, rank = Layers(), transport.rank
        reducer = reducer_of(model, transport, 2, 2, 2)
        step(model, reducer, rank, 0)
        before = gradients(model)
        model.layers[0].requires_grad_(False)
        for layer in (model.layers[1], model.layers[2]):
            layer.zero_grad()
        step(model, reducer, rank, 1)
        return before, gradients(model)

    for before, after in on_ranks(train):
        fresh = averages(Layers(), 1)
        assert_close(after, {n: (before if "layers.0" in n else fresh)[n] for n in after})
