"""A failure here is a plan that ends too late where groups are selected before they are sent."""

import numpy as np
import pytest
from hypothesis import given, settings
from plan_examples import end_of, make_profile, partitions, profiles, selecting_costs

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    Cost,
    ModelProfile,
    Optimal,
    SortSelection,
    SparseCost,
    Table,
    TopKPairs,
    pareto,
)
from lightning_mgwfbp.plan.optimal import ROUNDING


@settings(max_examples=200, deadline=None)
@given(profiles(), selecting_costs)
def test_optimal_is_brute_force(profile: ModelProfile, cost: Cost) -> None:
    """The fronts or the deadlines drop a way to the earliest end."""
    groups = Optimal().plan(profile, cost).groups
    earliest = min(end_of(profile, each, cost) for each in partitions(len(profile.layers)))
    assert end_of(profile, groups, cost) <= earliest * (1 + ROUNDING)


@settings(max_examples=100, deadline=None)
@given(profiles(), selecting_costs)
def test_no_cut_is_idle(profile: ModelProfile, cost: Cost) -> None:
    """Two neighbours could be merged at no loss: the first cut that could go was kept."""
    groups = Optimal().plan(profile, cost).groups
    end = end_of(profile, groups, cost)
    if len(groups) > 1:
        (_, _), (_, stop) = groups[:2]
        assert end_of(profile, ((0, stop), *groups[2:]), cost) > end * (1 - ROUNDING)


@settings(max_examples=50, deadline=None)
@given(profiles(most_layers=30), selecting_costs)
def test_optimal_is_never_worse(profile: ModelProfile, cost: Cost) -> None:
    """Some planner beats the exact search."""
    best = end_of(profile, Optimal().plan(profile, cost).groups, cost)
    for planner in PLANNERS.values():
        end = end_of(profile, planner.plan(profile, cost).groups, cost)
        assert best <= end * (1 + ROUNDING)


@pytest.mark.parametrize("widths", [(None,), (1, None), (2, 3, None)])
def test_bounds_change_no_end(
    widths: tuple[int | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrow searches, which only bound the last one, decide about the plan."""
    generator = np.random.default_rng(3)
    profile = make_profile(
        generator.exponential(1e-3, 40), generator.integers(1, 10**6, 40).tolist()
    )
    cost = SparseCost(AlphaBeta(2e-4, 2e-8), SortSelection(1e-10), TopKPairs(0.01))
    expected = end_of(profile, Optimal().plan(profile, cost).groups, cost)
    monkeypatch.setattr(pareto, "_WIDTHS", widths)
    assert end_of(profile, Optimal().plan(profile, cost).groups, cost) == pytest.approx(
        expected, rel=2 * ROUNDING
    )


def test_the_earlier_prefix_may_be_the_worse() -> None:
    """Only the earliest link is kept per prefix, though its selections delay what follows.

    Together the first two free the link at 1 + 2 + 2 = 5, one by one at 1.5 + 2 + 2 = 5.5; but then
    they are selected in 1 second instead of 2, and the last gradient decides about the end.
    """
    profile = make_profile([1, 0, 9], [1, 1, 1])
    selection = Table(((0, 0.0), (1, 0.5), (2, 2.0), (3, 9.0)))
    cost = SparseCost(AlphaBeta(2.0, 0.0), selection, TopKPairs(1.0))
    assert Optimal().plan(profile, cost).groups == ((0, 1), (1, 2), (2, 3))
    assert end_of(profile, [(0, 1), (1, 2), (2, 3)], cost) == 10 + 1.5 + 2
