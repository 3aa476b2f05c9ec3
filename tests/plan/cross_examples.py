"""Small profiles with a forward, costs of halves, and all schedules, for exchanges in halves."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hypothesis import strategies as st
from plan_examples import dense_costs, exact, make_profile, partitions, profiles, tables

from lightning_mgwfbp.plan import (
    HalvesCost,
    MergePlan,
    ModelProfile,
    forward_tails,
    with_forward_times,
)


def make_cross_profile(
    backward: Sequence[float], numels: Sequence[int], forward: Sequence[float]
) -> ModelProfile:
    """Parameters in backward order, each with its seconds of forward, in the reverse order."""
    profile = make_profile(backward, numels)
    layers = zip(profile.layers, forward, strict=True)
    timed = tuple(replace(layer, forward_seconds=seconds) for layer, seconds in layers)
    return replace(profile, layers=timed, forward_seconds=float(sum(forward)))


@st.composite
def cross_profiles(draw: st.DrawFn, most_layers: int) -> ModelProfile:
    """Forward may be unmeasured, or use the parameters in any order, some at once."""
    profile = replace(draw(profiles(most_layers)), forward_seconds=draw(exact) * 8)
    if draw(st.booleans()):
        return profile
    uses = {name: draw(exact) for name in profile.names}
    return with_forward_times(profile, uses, draw(exact) + 0.75)


halves = st.one_of(dense_costs().map(lambda cost: cost.link), tables())
halves_costs = st.one_of(
    st.builds(HalvesCost, halves, halves),
    dense_costs().map(lambda cost: HalvesCost.of_all_reduce(cost.link)),
)


def orders(pieces: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every order in which the halves of groups of so many pieces each can follow each other.

    g is the next piece of group g to be reduce-scattered, -1 - g its next one to be all-gathered.
    """

    def extend(begun: tuple[int, ...], left: Counter[int]) -> Iterator[tuple[int, ...]]:
        if not left.total():
            yield begun
        for code in [code for code, count in left.items() if count]:
            if code >= 0 or left[code] > left[-1 - code]:
                yield from extend((*begun, code), left - Counter([code]))

    left = {code: count for g, count in enumerate(pieces) for code in (g, -1 - g)}
    return extend((), Counter(left))


def iteration_of(
    profile: ModelProfile,
    groups: Sequence[tuple[int, int]],
    pieces: Sequence[int],
    order: Sequence[int],
    cost: HalvesCost,
) -> float:
    """Seconds of an iteration with any one of `orders(pieces)`, whatever rule it follows."""
    tails, sizes = forward_tails(profile), cost.sizes(profile)
    now, iteration = 0.0, profile.backward_seconds + profile.forward_seconds
    for code in order:
        group = code if code >= 0 else -1 - code
        start, stop = groups[group]
        nbytes = sizes[start:stop].sum() / pieces[group]
        if code >= 0:
            now = max(now, profile.ready_seconds[stop - 1]) + float(cost.reduce_scatter(nbytes))
        else:
            now += float(cost.all_gather(nbytes))
            iteration = max(iteration, now + tails[start:stop].max())
    return iteration


def in_halves(
    profile: ModelProfile,
    groups: Sequence[tuple[int, int]],
    pieces: Sequence[int],
    gather_order: Sequence[int],
) -> MergePlan:
    return MergePlan(
        profile.names, tuple(groups), pieces=tuple(pieces), gather_order=tuple(gather_order)
    )


@st.composite
def plans_in_halves(draw: st.DrawFn, profile: ModelProfile) -> MergePlan:
    """Any groups, pieces and order."""
    groups = draw(st.sampled_from(list(partitions(len(profile.layers)))))
    pieces = draw(st.lists(st.integers(1, 3), min_size=len(groups), max_size=len(groups)))
    gathers = [group for group, count in enumerate(pieces) for _ in range(count)]
    return in_halves(profile, groups, pieces, draw(st.permutations(gathers)))
