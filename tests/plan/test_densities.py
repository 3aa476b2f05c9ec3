"""A failure here is a group sent at a density that costs time, or that could be larger for free."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_examples import make_profile, profiles

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    CheaperCost,
    DenseCost,
    MergePlan,
    ModelProfile,
    SortSelection,
    SparseCost,
    TopKPairs,
    choose_densities,
    largest_hidden_densities,
    simulate,
)

FLOOR = 0.01


def cost_at(density: float) -> SparseCost:
    return SparseCost(AlphaBeta(0.25, 1e-5), SortSelection(1e-7), TopKPairs(density))


def at_no_selection(density: float) -> SparseCost:
    return SparseCost(AlphaBeta(0.25, 1e-5), SortSelection(0.0), TopKPairs(density))


def begins(profile: ModelProfile, plan: MergePlan, dense: DenseCost) -> list[float]:
    """When each message begins at the plan's own densities, and when the last one ends."""
    sparse_offsets, offsets = cost_at(FLOOR).offsets(profile), dense.offsets(profile)
    selected = link_free = 0.0
    times = []
    for (start, stop), density in zip(plan.groups, plan.densities, strict=True):
        assert density is not None
        ready, communicate = profile.ready_seconds[stop - 1], 0.0
        if density == 1:
            communicate = float(dense.communicate(offsets[stop] - offsets[start]))
        else:
            size, cost = sparse_offsets[stop] - sparse_offsets[start], cost_at(density)
            selected += float(cost.select(size))
            communicate = float(cost.communicate(size))
        times.append(max(link_free, ready + selected))
        link_free = times[-1] + communicate
    return [*times, link_free]


planned = st.tuples(
    profiles(most_layers=9),
    st.sampled_from([PLANNERS[name] for name in ("wfbp", "mgwfbp", "optimal")]),
    st.sampled_from([0.0, 1e-6, 1e-5, 1e-4]).map(lambda beta: DenseCost(AlphaBeta(0.25, beta))),
)


@settings(max_examples=150, deadline=None)
@given(planned)
def test_nothing_is_later_than_at_the_floor(drawn: tuple) -> None:
    """Some message begins later than with the floor everywhere, or the last ends later."""
    profile, planner, dense = drawn
    plan = planner.plan(profile, cost_at(FLOOR))
    timeline = simulate(profile, plan, cost_at(FLOOR))
    at_floor = [span.begin_seconds for span in timeline.spans]
    chosen = largest_hidden_densities(profile, plan, cost_at, dense, FLOOR)
    times = begins(profile, chosen, dense)
    for time, latest in zip(times, [*at_floor, timeline.communication_end_seconds], strict=True):
        assert time <= latest * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(planned)
def test_no_density_could_be_larger(drawn: tuple) -> None:
    """A group could send one per cent more without delaying a message beyond its time."""
    profile, planner, dense = drawn
    plan = planner.plan(profile, cost_at(FLOOR))
    at_floor = [span.begin_seconds for span in simulate(profile, plan, cost_at(FLOOR)).spans]
    chosen = largest_hidden_densities(profile, plan, cost_at, dense, FLOOR)
    for index, density in enumerate(chosen.densities[:-1]):
        if density is None or density * 1.01 >= 1:
            continue
        more = list(chosen.densities)
        more[index] = density * 1.01
        times = begins(profile, replace(chosen, densities=tuple(more)), dense)
        assert times[index + 1] > at_floor[index + 1]
    assert chosen.densities[-1] in (FLOOR, 1)


def test_by_hand() -> None:
    """The slack before the next message is not what a group's density is taken from.

    At the floor the first message begins at 1, the second at 2 and the third at 10. A message takes
    1/4 second and 8e-5 for each element sent; so the first may send (2 - 1 - 1/4) / 8e-5 = 9375.
    The second hides even as a whole, in 1/4 + 4; the last has nothing to hide behind.
    """
    profile = make_profile([1, 1, 8], [100_000] * 3)
    plan = MergePlan(profile.names, ((0, 1), (1, 2), (2, 3)))
    dense = DenseCost(AlphaBeta(0.25, 1e-5))
    chosen = largest_hidden_densities(profile, plan, at_no_selection, dense, FLOOR)
    assert chosen.densities == (pytest.approx(0.09375, rel=2e-3), 1, FLOOR)


def test_floor_of_one_is_whole() -> None:
    """Everything travels, but not by all-reduce."""
    profile = make_profile([1, 1], [10, 10])
    plan = MergePlan(profile.names, ((0, 1), (1, 2)))
    chosen = largest_hidden_densities(profile, plan, cost_at, DenseCost(AlphaBeta(9.0, 1.0)), 1.0)
    assert chosen.densities == (1, 1)


@pytest.mark.parametrize("floor", [0, 1.5, float("nan")])
def test_floor_is_refused(floor: float) -> None:
    """A floor that is no density is accepted."""
    profile = make_profile([1], [10])
    plan = MergePlan(profile.names, ((0, 1),))
    with pytest.raises(ValueError, match=r"`floor` must be in \(0, 1\]"):
        largest_hidden_densities(profile, plan, cost_at, DenseCost(AlphaBeta(0, 0)), floor)


def test_choose_densities() -> None:
    """A group that is cheaper dense is not marked as whole, or one is that is not."""
    profile = make_profile([1, 1], [10, 10_000])
    plan = MergePlan(profile.names, ((0, 1), (1, 2)))
    sparse = SparseCost(AlphaBeta(1.0, 1.0), SortSelection(0.0), TopKPairs(0.01))
    cost = CheaperCost(DenseCost(AlphaBeta(0.0, 0.2)), sparse)
    assert choose_densities(profile, plan, cost).densities == (1, None)
    assert (
        choose_densities(profile, plan, CheaperCost(DenseCost(AlphaBeta(0, 9.0)), sparse)) == plan
    )
