"""A failure here is a wrong prediction: the recurrence, exposed time, or the lower bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import costs, make_profile, partitions, profiles, selecting_costs

from lightning_mgwfbp.plan import (
    AlphaBeta,
    Cost,
    DenseCost,
    MergePlan,
    ModelProfile,
    Span,
    SparseCost,
    Table,
    TopKPairs,
    lower_bound_seconds,
    simulate,
)

UNIT = DenseCost(AlphaBeta(alpha=1.0, beta=0.25))


def test_worked_example() -> None:
    """The two clocks: the second group waits for the link, the third for its gradient."""
    profile = make_profile([1, 1, 6], [1, 3, 2])
    plan = MergePlan(profile.names, ((0, 1), (1, 2), (2, 3)))
    timeline = simulate(profile, plan, UNIT)
    assert timeline.spans == (
        Span("communicate", 0, 1, 3),
        Span("communicate", 1, 3, 7),
        Span("communicate", 2, 8, 11),
    )
    assert timeline.communication_end_seconds == 11
    assert timeline.backward_seconds == 8
    assert timeline.exposed_seconds == 3
    assert timeline.lower_bound_seconds == 11  # the last gradient: 8 + 3 > 1 + (1 + 6)


def test_selections_delay_backward() -> None:
    """Selections do not take the compute stream's time, or the third message does not wait.

    The middle parameter is too small to be selected; each other selection takes 2 seconds.
    """
    profile = make_profile([1, 1, 1], [2, 1, 2])
    cost = SparseCost(
        AlphaBeta(1.0, 0.25), Table(((0, 2.0), (9, 2.0))), TopKPairs(0.5), exact_below=2
    )
    plan = MergePlan(profile.names, ((0, 1), (1, 2), (2, 3)))
    timeline = simulate(profile, plan, cost)
    assert timeline.selections == (Span("select", 0, 1, 3), Span("select", 2, 5, 7))
    assert timeline.spans == (
        Span("communicate", 0, 3, 6),
        Span("communicate", 1, 6, 8),
        Span("communicate", 2, 8, 11),
    )
    assert timeline.exposed_seconds == 11 - 7
    assert timeline.backward_seconds == 3
    assert timeline.lower_bound_seconds == 3 + 2 + 3


def test_lower_bound_by_bytes() -> None:
    """On a slow link the bound is not first gradient plus all bytes in one message."""
    profile = make_profile([1, 1], [30, 1])
    assert lower_bound_seconds(profile, UNIT) == 1 + (1 + 31)


@settings(max_examples=100, deadline=None)
@given(profiles(most_layers=7), st.one_of(costs, selecting_costs))
def test_no_plan_undercuts_the_lower_bound(profile: ModelProfile, cost: Cost) -> None:
    """The bound is not one: some plan ends earlier."""
    bound = lower_bound_seconds(profile, cost)
    for groups in partitions(len(profile.layers)):
        end = simulate(profile, MergePlan(profile.names, groups), cost).communication_end_seconds
        assert bound <= end * (1 + 1e-12)


def test_foreign_plan_is_refused() -> None:
    """A plan of other parameters, or of another order, is simulated as if it fitted."""
    profile = make_profile([1, 1], [1, 1])
    with pytest.raises(ValueError, match="the merge plan lacks the parameter 'p1'"):
        simulate(profile, MergePlan(("p0", "x"), ((0, 2),)), UNIT)
    with pytest.raises(ValueError, match="order"):
        simulate(profile, MergePlan(("p1", "p0"), ((0, 2),)), UNIT)
