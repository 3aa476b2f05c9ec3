"""A failure here is a wrong plan: a planner's rule, or the exact search."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from plan_examples import (
    costs,
    dense_costs,
    end_of,
    exact,
    make_profile,
    partitions,
    profiles,
    table_costs,
    tables,
)

from lightning_mgwfbp.plan import (
    MGWFBP,
    PLANNERS,
    AlphaBeta,
    Cost,
    DenseCost,
    ModelProfile,
    Optimal,
    SparseCost,
    Table,
    TableCost,
    Threshold,
    TopKPairs,
    resolve_planner,
    simulate,
)
from lightning_mgwfbp.plan.optimal import ROUNDING

PROFILES = sorted(Path(__file__).parent.parent.glob("data/profiles/*.json"))
UNIT = DenseCost(AlphaBeta(alpha=1.0, beta=0.25))  # 1 second, and 1 second per float32


def assert_as_brute_force(profile: ModelProfile, cost: Cost) -> None:
    plan = Optimal().plan(profile, cost)
    end = {groups: end_of(profile, groups, cost) for groups in partitions(len(profile.layers))}
    best = min(end.values()) * (1 + ROUNDING)
    assert end[plan.groups] <= best
    assert len(plan.groups) == min(len(groups) for groups in end if end[groups] <= best)


@settings(max_examples=150, deadline=None)
@given(profiles(), dense_costs())
def test_optimal_is_brute_force_on_a_link(profile: ModelProfile, cost: Cost) -> None:
    """The exact search misses the earliest end, or the fewest groups that reach it."""
    assert_as_brute_force(profile, cost)


@settings(max_examples=150, deadline=None)
@given(profiles(most_layers=8), table_costs())
def test_optimal_is_brute_force_on_any_cost(profile: ModelProfile, cost: Cost) -> None:
    """The exact search relies on a cost that grows, or on merging never being slower."""
    assert_as_brute_force(profile, cost)


@settings(max_examples=150, deadline=None)
@given(profiles(most_layers=30), costs)
def test_optimal_is_never_worse(profile: ModelProfile, cost: Cost) -> None:
    """Some planner beats the exact search, or all beat the lower bound."""
    best = simulate(profile, Optimal().plan(profile, cost), cost)
    for planner in PLANNERS.values():
        timeline = simulate(profile, planner.plan(profile, cost), cost)
        assert best.communication_end_seconds <= timeline.communication_end_seconds * (1 + ROUNDING)
    assert best.lower_bound_seconds <= best.communication_end_seconds * (1 + ROUNDING)


def test_fewest_groups_may_need_a_later_prefix() -> None:
    """Ties are broken prefix by prefix, which misses plans whose early groups use their slack.

    The first two gradients are sent by 6 one by one, and by 7 together; but the third exists at 9,
    so together costs nothing and saves a message.
    """
    profile = make_profile([1, 3, 5], [1, 1, 1])
    assert Optimal().plan(profile, UNIT).groups == ((0, 2), (2, 3))


def test_one_group_more_than_the_bound() -> None:
    """The search gives up, or errs, where its lower bound on the number of groups is not met."""
    seconds = [0, 0, 0, 3, 5, 5, 6, 8, 8, 10, 10, 10, 12, 12]
    cost = TableCost(tuple((4 * numel, each) for numel, each in enumerate(seconds)))
    assert_as_brute_force(make_profile([1, 10, 2, 3, 5], [5, 3, 1, 2, 2]), cost)


def test_without_latency_rounding_makes_no_groups() -> None:
    """Groups are bought for the last bit of a sum: t(x) + t(y) and t(x + y) round differently."""
    generator = np.random.default_rng(0)
    profile = make_profile(
        generator.uniform(0, 1e-3, 60), generator.integers(1, 10**6, 60).tolist()
    )
    cost = DenseCost(AlphaBeta(0.0, 1e-7))
    assert len(Optimal().plan(profile, cost).groups) < 10


def published_greedy(profile: ModelProfile, alpha: float, beta: float) -> list[tuple[int, int]]:
    """The rule as published, in its own terms: the link is busy, or the wait less than alpha."""
    ready = profile.ready_seconds
    groups, start, nbytes, link_free = [], 0, profile.nbytes[0], 0.0
    for index in range(1, len(ready)):
        begin = max(ready[index - 1], link_free)
        end = begin + alpha + beta * nbytes
        if ready[index] < end and (begin > ready[index] or ready[index] - begin < alpha):
            nbytes += profile.nbytes[index]
        else:
            groups.append((start, index))
            start, nbytes, link_free = index, profile.nbytes[index], end
    return [*groups, (start, len(ready))]


@settings(max_examples=200, deadline=None)
@given(profiles(most_layers=12, durations=(exact,)))
def test_mgwfbp_is_the_published_rule(profile: ModelProfile) -> None:
    """The greedy merges where it should not, or keeps the clocks wrongly after a merge."""
    for alpha, beta in ((1.0, 0.25), (0.125, 0.25), (0.5, 0.0)):
        plan = MGWFBP().plan(profile, DenseCost(AlphaBeta(alpha, beta)))
        assert list(plan.groups) == published_greedy(profile, alpha, beta)


def test_mgwfbp_by_hand() -> None:
    """A worked example fails: wait 0.5 < 1 merges, link busy merges, wait 3 does not."""
    profile = make_profile([1, 0.5, 0, 3, 0.25], [1, 1, 1, 1, 1])
    # [0, 3) begins at 1.5 and would end at 5.5; gradient 3 exists at 4.5, 3 after 1.5.
    assert MGWFBP().plan(profile, UNIT).groups == ((0, 3), (3, 5))


# Each float32 takes a second to send with its index, each message 1; selecting n takes points[n].
def selecting(*seconds: float) -> SparseCost:
    return SparseCost(AlphaBeta(1.0, 1 / 8), Table(tuple(enumerate(seconds))), TopKPairs(1.0))


def test_omgs_by_hand() -> None:
    """A worked example fails: the clocks under selection, or the wait in them.

    Gradients at 1, 1.5 and 8. The first alone is selected by 2 and sent until 4. Merged with the
    second it is sent from 3.5 on: 0.5 + s(2) - s(1) - s(1) - 0 = 0.5 < 1, so they merge. The third
    exists at 8: waiting for it takes 8 + s(3) - s(1) - 3.5 = 5.5 > 1.
    """
    profile = make_profile([1, 0.5, 6.5], [1, 1, 1])
    assert MGWFBP().plan(profile, selecting(0, 1, 2, 2)).groups == ((0, 2), (2, 3))


def test_selection_that_grows_faster_is_not_merged() -> None:
    """What selecting both costs beyond selecting each is not weighed against the start-up saved.

    Without a wait, s(2) - s(1) - s(1) = 1 is not less than 1; a little less than 1 is.
    """
    profile = make_profile([1, 0], [1, 1])
    assert MGWFBP().plan(profile, selecting(0, 1, 3 + 1)).groups == ((0, 1), (1, 2))
    assert MGWFBP().plan(profile, selecting(0, 1, 2.75)).groups == ((0, 2),)


def published_omgs(profile: ModelProfile, cost: SparseCost) -> list[tuple[int, int]]:
    """The rule as published, in its own terms: waiting against saving, layer by layer."""
    offsets = cost.offsets(profile)

    def seconds(start: int, stop: int) -> tuple[float, float]:
        size = offsets[stop] - offsets[start]
        return float(cost.select(size)), float(cost.communicate(size))

    groups, start, link_free = [], 0, 0.0
    ready = profile.layers[0].backward_seconds
    for index in range(1, len(profile.layers)):
        (s_x, g_x), (s_y, g_y) = seconds(start, index), seconds(index, index + 1)
        s_xy, g_xy = seconds(start, index + 1)
        begin = max(link_free, ready + s_x)
        step = profile.layers[index].backward_seconds
        if step + s_xy - s_x - s_y - (begin - (ready + s_x)) < g_x + g_y - g_xy:
            ready += step
        else:
            groups.append((start, index))
            start, link_free, ready = index, begin + g_x, ready + s_x + step
    return [*groups, (start, len(profile.layers))]


@settings(max_examples=200, deadline=None)
@given(profiles(most_layers=12, durations=(exact,)), tables())
def test_mgwfbp_with_selections_is_the_published_rule(profile: ModelProfile, table: Table) -> None:
    """The greedy is not OMGS where groups are selected first."""
    layers = tuple(replace(layer, numel=2 ** (layer.numel % 4)) for layer in profile.layers)
    eighths = Table(tuple((4 * i, round(8 * float(table(i))) / 8) for i in range(13)))
    cost = SparseCost(AlphaBeta(0.5, 1 / 32), eighths, TopKPairs(0.25))
    profile = replace(profile, layers=layers)
    assert list(MGWFBP().plan(profile, cost).groups) == published_omgs(profile, cost)


@pytest.mark.parametrize(
    ("nbytes", "groups"),
    [
        (0, ((0, 1), (1, 2), (2, 3), (3, 4))),
        (12, ((0, 2), (2, 4))),
        (13, ((0, 3), (3, 4))),
        (1000, ((0, 4),)),
    ],
)
def test_threshold(nbytes: int, groups: tuple[tuple[int, int], ...]) -> None:
    """A group does not close when its bytes (not its elements) reach the threshold."""
    profile = make_profile([1] * 4, [1, 2, 2, 1])
    assert Threshold(nbytes).plan(profile, UNIT).groups == groups


def test_wfbp_and_single() -> None:
    """The two extremes are not every gradient alone and all in one."""
    profile = make_profile([1] * 3, [1] * 3)
    assert PLANNERS["wfbp"].plan(profile, UNIT).groups == ((0, 1), (1, 2), (2, 3))
    assert PLANNERS["single"].plan(profile, UNIT).groups == ((0, 3),)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_real_profiles_at_one_gigabit(path: Path) -> None:
    """On real models the exact plan loses to another, or does not overlap at all."""
    profile = ModelProfile.load(path)
    cost = DenseCost(AlphaBeta(1e-4, 8e-9))
    end = {
        name: simulate(profile, planner.plan(profile, cost), cost).communication_end_seconds
        for name, planner in PLANNERS.items()
    }
    assert min(end.values()) == end["optimal"] < end["single"]


def test_resolve_planner() -> None:
    """A name leads to the wrong planner, or a wrong name to no list of the right ones."""
    assert resolve_planner("auto") == Optimal()
    assert resolve_planner("mgwfbp") == MGWFBP()
    assert resolve_planner(Threshold(7)) == Threshold(7)
    with pytest.raises(ValueError, match=r"one of auto, wfbp, .*optimal, got 'fastest'"):
        resolve_planner("fastest")


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, "25MB"])
def test_threshold_refuses(nbytes: object) -> None:
    """A threshold that is no number of bytes is accepted."""
    with pytest.raises(ValueError, match=r"Threshold\(nbytes=...\)"):
        Threshold(nbytes)  # type: ignore[arg-type]
