"""A failure here is when the reducer launches, waits, or lets go; the averages have other tests."""

import copy
from typing import Any

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
    lasting,
    mean,
    plain,
    plan_of,
    reducer_of,
)
from loopback import on_ranks, record_keys
from torch import Tensor, nn

from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.transport import LoopbackTransport

BUCKETS = ["bucket 0", "bucket 1", "bucket 2"]


def launches(
    transport: LoopbackTransport, orders: list[tuple[int, ...]], held: bool = False
) -> list[tuple[list[str], list[str]]]:
    """For each step: what was launched when backward ended, and when synchronize had."""
    model = Layers()
    reducer = reducer_of(model, transport, 2, 2, 2)
    if held:
        reducer.hold()
    keys = record_keys(transport)
    seen = []
    for step in range(3):
        backward(model, data_of(transport.rank, step), orders[transport.rank])
        during = list(keys)
        reducer.synchronize()
        seen.append((during, list(keys)))
        keys.clear()
        model.zero_grad()
    return seen


def test_groups_are_launched_while_backward_runs_but_for_the_last() -> None:
    """Nothing overlaps, or a bucket goes out before its gradients exist."""
    for seen in on_ranks(launches, [ALL] * 2):
        assert seen[0] == ([], BUCKETS)  # who fires how often is not known yet
        assert seen[1:] == [(BUCKETS[:2], BUCKETS)] * 2


def test_while_held_nothing_is_launched_during_backward() -> None:
    """Communication disturbs the measurement of backward."""
    for seen in on_ranks(launches, [ALL] * 2, True):
        assert seen == [([], BUCKETS)] * 3


def test_before_a_plan_groups_are_held_and_of_25_mib() -> None:
    """The warm-up begins with communication inside backward, or with another plan than DDP's."""
    parameter = nn.Parameter(torch.ones(26 * 2**18))
    first, last = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    named = [("last", last), ("large", parameter), ("first", first)]
    transport = LoopbackTransport.solo()
    keys = record_keys(transport)
    reducer = Reducer(lasting(named), DenseExchanger(transport))
    assert reducer.plan.names == ("first", "large", "last")
    assert reducer.plan.groups == ((0, 2), (2, 3))
    for _ in range(2):
        keys.clear()
        (first.sum() + parameter.sum() + last.sum()).backward()
        assert keys == []
        reducer.synchronize()
        assert keys == BUCKETS[:2]


def test_launch_order_is_the_plans_on_every_rank() -> None:
    """Ranks whose autograd ends in another order meet in different collectives."""
    usual, reversed_ = on_ranks(launches, [ALL, (2, 1, 0)])
    assert [after for _, after in usual + reversed_] == [BUCKETS] * 6
    # on the second rank the first group is complete last, and the others wait for it
    assert reversed_[1][0] == BUCKETS[:2]


def test_a_rank_without_any_backward_takes_part() -> None:
    """Ranks hang when one rank's loss reaches no parameter."""
    used = [ALL, ()]
    model = Layers()
    expected = mean([plain(model, (data_of(0, 2), ALL)), plain(model)])

    def train(transport: LoopbackTransport) -> Gradients:
        reducer = reducer_of(ours := copy.deepcopy(model), transport, 2, 2, 2)
        for step in range(3):
            ours.zero_grad()
            backward(ours, data_of(transport.rank, step), used[transport.rank])
            assert reducer.unsynchronized == (transport.rank == 0)
            reducer.synchronize()
            assert not reducer.unsynchronized
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, expected)


def storages(transport: LoopbackTransport) -> list[list[int]]:
    model = Layers()
    reducer = reducer_of(model, transport, 2, 4)
    seen = []
    for step in range(4):
        backward(model, data_of(transport.rank, step))
        reducer.synchronize()
        parameters = list(model.parameters())[::-1]
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in parameters)
        seen.append([p.grad.untyped_storage().data_ptr() for p in parameters])  # type: ignore
        model.zero_grad()
    return seen


def test_gradients_lie_where_they_lay_in_the_step_before() -> None:
    """Gradients take memory twice, or new memory in every step."""
    for seen in on_ranks(storages):
        assert seen[1:] == [seen[0]] * 3


def test_a_gradient_that_is_held_is_never_overwritten() -> None:
    """What the user kept of one step changes in the next."""

    def train(transport: LoopbackTransport) -> None:
        model = Layers()
        reducer = reducer_of(model, transport, 2, 4)
        held: list[Tensor] = []
        kept: list[Tensor] = []
        for step in range(4):
            model.zero_grad()
            backward(model, data_of(transport.rank, step))
            reducer.synchronize()
            held += [p.grad for p in model.parameters() if p.grad is not None]
            kept = [*kept, *(h.clone() for h in held[len(kept) :])]
            assert all(map(torch.equal, held, kept))
        assert len(held) == 24

    on_ranks(train)


def test_static_graph_averages_the_same() -> None:
    """The promise of a static graph changes results."""
    model = Layers()

    def train(transport: LoopbackTransport) -> Gradients:
        reducer = reducer_of(ours := copy.deepcopy(model), transport, 3, 3, static_graph=True)
        for step in range(3):
            ours.zero_grad()
            backward(ours, data_of(transport.rank, step))
            reducer.synchronize()
        return gradients(ours)

    for seen in on_ranks(train):
        assert_close(seen, averages(model, 2))


def test_close_removes_all_hooks() -> None:
    """A reducer that was closed goes on to exchange."""

    def train(transport: LoopbackTransport) -> Gradients:
        model = Layers()
        reducer = reducer_of(model, transport, 2, 2, 2)
        for step in range(2):
            model.zero_grad()
            backward(model, data_of(transport.rank, step))
            reducer.synchronize()
        keys = record_keys(transport)
        reducer.close()
        model.zero_grad()
        backward(model, data_of(transport.rank, 9))
        assert keys == []
        return gradients(model)

    for rank, seen in enumerate(on_ranks(train)):
        assert_close(seen, plain(Layers(), (data_of(rank, 9), ALL)))


def test_mixed_dtypes_are_averaged_each_in_its_own() -> None:
    """A group of several dtypes: one of them is cast to another, or left out."""

    def train(transport: LoopbackTransport) -> dict[str, Any]:
        wide = nn.Parameter(torch.ones(2, dtype=torch.float64))
        narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        complex_ = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        named = {"wide": wide, "narrow": narrow, "complex": complex_}
        reducer = Reducer(lasting(named.items()), DenseExchanger(transport))
        factor = 1.0 + 2 * transport.rank  # 1 and 3
        (factor * (wide.sum() + narrow.sum() + (complex_ * (2 + 1j)).real.sum())).backward()
        reducer.synchronize()
        return {name: p.grad for name, p in named.items()}

    for seen in on_ranks(train):
        assert {n: (g.dtype, g.tolist()) for n, g in seen.items()} == {
            "wide": (torch.float64, [2.0] * 2),
            "narrow": (torch.bfloat16, [2.0] * 3),
            "complex": (torch.complex64, [4 - 2j] * 2),
        }


def test_exposed_seconds_are_those_of_the_present_plan() -> None:
    """The wait of other plans, or of the warm-up, is counted in."""
    model = Layers()
    reducer = reducer_of(model, LoopbackTransport.solo())
    assert reducer.exposed_seconds is None
    reducer.synchronize()
    assert reducer.exposed_seconds is not None
    assert reducer.exposed_seconds > 0
    assert reducer.exchanges == 1
    reducer.install(plan_of(model, 6))
    assert reducer.exposed_seconds is None
