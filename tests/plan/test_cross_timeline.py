"""A failure here is a wrong prediction of an iteration whose all-gathers hide behind forward."""

from dataclasses import replace
from itertools import permutations, product

import pytest
from cross_examples import (
    cross_profiles,
    halves_costs,
    in_halves,
    iteration_of,
    make_cross_profile,
    orders,
    plans_in_halves,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import make_profile, partitions

from lightning_mgwfbp.plan import (
    AlphaBeta,
    HalvesCost,
    MergePlan,
    ModelProfile,
    Span,
    simulate_cross_iteration,
)

UNIT = HalvesCost(AlphaBeta(1.0, 0.25), AlphaBeta(2.0, 0.25))  # seconds: 1 + numel, 2 + numel


def test_one_message() -> None:
    """Of one group in one piece: ready, both halves, and then all of forward."""
    profile = make_cross_profile([1, 3], [1, 2], [5, 6])
    plan = in_halves(profile, [(0, 2)], [1], [0])
    timeline = simulate_cross_iteration(profile, plan, UNIT)
    assert timeline.spans == (Span("reduce_scatter", 0, 4, 8), Span("all_gather", 0, 8, 13))
    assert timeline.iteration_seconds == 13 + 11
    assert timeline.backward_seconds == 4
    assert timeline.forward_seconds == 11
    assert timeline.exposed_seconds == 24 - 15


def test_forward_hides_what_is_used_late() -> None:
    """The all-gather that comes last delays all of forward, not only what uses it."""
    profile = make_cross_profile([1, 6], [2, 3], [1, 10])
    plan = in_halves(profile, [(0, 1), (1, 2)], [2, 1], [1, 0, 0])  # forward uses 1 first
    timeline = simulate_cross_iteration(profile, plan, UNIT)
    assert timeline.spans == (
        Span("reduce_scatter", 0, 1, 3),
        Span("reduce_scatter", 0, 3, 5),
        Span("reduce_scatter", 1, 7, 11),
        Span("all_gather", 1, 11, 16),
        Span("all_gather", 0, 16, 19),
        Span("all_gather", 0, 19, 22),
    )
    assert timeline.iteration_seconds == 16 + 11


def test_an_all_gather_fills_a_gap_once_its_own_half_is_done() -> None:
    """The link idles although there is something to send, or sends what is not reduced yet."""
    profile = make_cross_profile([1, 6], [2, 3], [1, 1])
    plan = in_halves(profile, [(0, 1), (1, 2)], [1, 1], [0, 1])
    spans = simulate_cross_iteration(profile, plan, UNIT).spans
    assert [(span.what, span.index, span.begin_seconds) for span in spans] == [
        ("reduce_scatter", 0, 1),
        ("all_gather", 0, 4),
        ("reduce_scatter", 1, 8),
        ("all_gather", 1, 12),
    ]


@pytest.mark.parametrize("gather_order", list(permutations(range(3))))
def test_what_forward_uses_first_is_gathered_first(gather_order: tuple[int, ...]) -> None:
    """All-gathers go in the order in which they were reduced, or in another than the plan's."""
    profile = make_cross_profile([1, 0, 0], [1, 1, 1], [1, 1, 1])
    plan = in_halves(profile, [(0, 1), (1, 2), (2, 3)], [1, 1, 1], gather_order)
    spans = simulate_cross_iteration(profile, plan, UNIT).spans
    assert [span.index for span in spans] == [0, 1, 2, *gather_order]


@settings(max_examples=50, deadline=None)
@given(cross_profiles(most_layers=5), halves_costs, st.data())
def test_the_link_follows_the_rule(
    profile: ModelProfile, cost: HalvesCost, data: st.DataObject
) -> None:
    """The link idles while the next one could go, or takes another, or one that is not there."""
    plan = data.draw(plans_in_halves(profile))
    ready = [float(profile.ready_seconds[stop - 1]) for _, stop in plan.groups]
    left = [group for group, pieces in enumerate(plan.pieces) for _ in range(pieces)]
    gathers = list(plan.gather_order)
    reduced: list[int] = []
    now = 0.0
    for span in simulate_cross_iteration(profile, plan, cost).spans:
        if left and (ready[left[0]] <= now or gathers[0] not in reduced):
            due = ("reduce_scatter", left[0], max(now, ready[left[0]]))
            reduced.append(left.pop(0))
        else:
            due = ("all_gather", gathers.pop(0), now)
            reduced.remove(due[1])
        assert (span.what, span.index, span.begin_seconds) == due
        now = span.end_seconds
    assert not left
    assert not reduced


@settings(max_examples=50, deadline=None)
@given(cross_profiles(most_layers=5), halves_costs, st.data())
def test_messages_take_what_they_cost(
    profile: ModelProfile, cost: HalvesCost, data: st.DataObject
) -> None:
    """Bytes, seconds or tails of a message are not those of its piece of its group."""
    plan = data.draw(plans_in_halves(profile))
    timeline = simulate_cross_iteration(profile, plan, cost)
    order = [s.index if s.what == "reduce_scatter" else -1 - s.index for s in timeline.spans]
    same = iteration_of(profile, plan.groups, plan.pieces, order, cost)
    assert timeline.iteration_seconds == pytest.approx(same, rel=1e-12)


def test_computation_bounds_the_iteration() -> None:
    """Where everything hides, an iteration is not backward and forward."""
    profile = make_cross_profile([1, 50], [2, 0], [100, 1])
    plan = in_halves(profile, [(0, 1), (1, 2)], [1, 1], [0, 1])
    free = HalvesCost(AlphaBeta(0.0, 0.25), AlphaBeta(0.0, 0.25))
    timeline = simulate_cross_iteration(profile, plan, free)
    assert timeline.iteration_seconds == timeline.lower_bound_seconds == 152
    assert timeline.exposed_seconds == 0


def test_lower_bound_is_the_worst_set() -> None:
    """The bound is not that of the most demanding set: here neither all nor the last parameter."""
    profile = make_cross_profile([1, 1, 1], [9, 9, 0], [1, 10, 1])
    plan = in_halves(profile, [(0, 3)], [1], [0])
    free = HalvesCost(AlphaBeta(0.0, 0.25), AlphaBeta(0.0, 0.25))
    # all: 1 + 36 + 1; the last two: 2 + 18 + 11; the last: 3 + 0 + 12
    assert simulate_cross_iteration(profile, plan, free).lower_bound_seconds == 38
    wide = make_cross_profile([1, 1, 1], [1, 9, 0], [1, 10, 1])
    # all: 1 + 20 + 1; the last two: 2 + 18 + 11; the last: 3 + 0 + 12
    assert simulate_cross_iteration(wide, plan, free).lower_bound_seconds == 31


@settings(max_examples=50, deadline=None)
@given(cross_profiles(most_layers=3), halves_costs)
def test_no_plan_undercuts_the_lower_bound(profile: ModelProfile, cost: HalvesCost) -> None:
    """The bound is not one: some groups, pieces and order take less."""
    everything = in_halves(profile, [(0, len(profile.layers))], [1], [0])
    bound = simulate_cross_iteration(profile, everything, cost).lower_bound_seconds
    for groups in partitions(len(profile.layers)):
        for pieces in product((1, 2), repeat=len(groups)):
            for order in orders(pieces) if sum(pieces) <= 3 else ():
                assert bound <= iteration_of(profile, groups, pieces, order, cost) * (1 + 1e-12)


def test_foreign_plans_are_refused() -> None:
    """A plan of other parameters, of the same otherwise ordered, or without pieces is simulated."""
    profile = make_profile([1, 1], [1, 1])
    plan = in_halves(profile, [(0, 2)], [1], [0])
    with pytest.raises(ValueError, match="the merge plan lacks the parameter 'p1'"):
        simulate_cross_iteration(profile, replace(plan, names=("p0", "x")), UNIT)
    with pytest.raises(ValueError, match="in the profile's order"):
        simulate_cross_iteration(profile, replace(plan, names=("p1", "p0")), UNIT)
    with pytest.raises(ValueError, match="must have pieces"):
        simulate_cross_iteration(profile, MergePlan(profile.names, ((0, 2),)), UNIT)
