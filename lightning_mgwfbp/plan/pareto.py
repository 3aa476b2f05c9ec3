"""The exact merge plan where groups are selected before they are sent.

Selections run on the compute stream and delay all that backward does after them. So after the first
j gradients two clocks matter, the seconds selected so far and when the link is free:

    selected_j = selected_i + s(i..j-1),
    link_free_j = max(link_free_i, ready_{j-1} + selected_j) + t(i..j-1),

with s(.) and t(.) the seconds to select and to send a group, and `ready` as without selections.
Less on one clock may cost more on the other, so each prefix keeps its Pareto front: a point goes
where another is no later on either clock, since whatever follows could follow that one. A point
goes too where no rest can end as early as a plan that is known. Such a plan comes from the same
search with few points per prefix, a better one with more; the last search keeps all: it is exact.
Where it would keep more than can be worked through in about a second (hundreds of layers of
contrived sizes), the plan of the search before is taken; there it ended within 2e-5 of the exact.

Nothing is assumed of s(.) and t(.). Of plans that end as early, it is not always one of the fewest
groups that is found; but cuts that can go without a later end are undone, one after another.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.costs import Cost
from lightning_mgwfbp.plan.optimal import ROUNDING

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_WIDTHS = (4, 32, 256, None)  # most points per prefix, search by search
_MOST_POINTS = 200_000  # of all prefixes together


def pareto_groups(ready: FloatArray, offsets: FloatArray, cost: Cost) -> list[tuple[int, int]]:
    """`[start, stop)` groups that end within `ROUNDING` of the earliest possible end, unless the
    search is given up: see above.

    Shapes: `ready` (layers,) seconds; `offsets` (layers + 1,) or (layers + 1, d), the size of all
    gradients before. Memory grows with the square of the number of layers.
    """
    search = _Search(ready, *_seconds_of_groups(offsets, cost))
    latest = np.inf
    for width in _WIDTHS:
        found = search.fronts(width, latest)
        if found is None:
            break
        fronts = found
        latest = fronts[-1].link_free.min() * (1 + ROUNDING)
    return search.without_idle_cuts(_trace_back(fronts), latest)


def _seconds_of_groups(offsets: FloatArray, cost: Cost) -> tuple[FloatArray, FloatArray]:
    """Seconds to select and to send the group `[start, stop)`, at `[start, stop]`."""
    select = np.full((len(offsets), len(offsets)), np.inf)
    communicate = select.copy()
    for stop in range(1, len(offsets)):
        sizes = offsets[stop] - offsets[:stop]
        select[:stop, stop], communicate[:stop, stop] = cost.select(sizes), cost.communicate(sizes)
    return select, communicate


@dataclass(frozen=True)
class _Front:
    """A prefix's points, all arrays (points,), by rising `selected` and falling `link_free`.

    Each one was reached by a group from the prefix `start`, from the point `before` of its front.
    """

    selected: FloatArray
    link_free: FloatArray
    start: IntArray
    before: IntArray

    def at(self, points: IntArray) -> "_Front":
        return _Front(
            self.selected[points], self.link_free[points], self.start[points], self.before[points]
        )


_NOTHING = np.zeros(0, dtype=np.int64)
_UNREACHED = _Front(np.zeros(0), np.zeros(0), _NOTHING, _NOTHING)
_BEGINNING = _Front(np.zeros(1), np.zeros(1), *np.zeros((2, 1), dtype=np.int64))


@dataclass(frozen=True)
class _Search:
    """Every end is summed as the simulator does, so that it will predict those found here."""

    ready: FloatArray  # (layers,)
    select: FloatArray  # (layers + 1, layers + 1)
    communicate: FloatArray  # (layers + 1, layers + 1)

    def fronts(self, width: int | None, latest: float) -> list[_Front] | None:
        """The front of every prefix, of points that may end by `latest`, thinned to `width`; None
        if they have too many points."""
        fronts = [_BEGINNING]
        points = 0
        least = np.full((2, len(self.select)), np.inf)  # each front's least selected and link_free
        least[:, 0] = 0.0
        deadlines = self._deadlines(latest)
        for stop in range(1, len(self.select)):
            clocks = self._add_group(least[0, :stop], least[1, :stop], np.arange(stop), stop)
            starts = np.flatnonzero(_in_time(*clocks, *deadlines[:, stop]))
            front = _thinned(self._front(fronts, starts, stop, deadlines[:, stop]), width)
            fronts.append(front)
            points += len(front.selected)
            if points > _MOST_POINTS:
                return None
            if len(front.selected):
                least[:, stop] = front.selected[0], front.link_free[-1]
        return fronts

    def _front(
        self, fronts: list[_Front], starts: IntArray, stop: int, deadlines: FloatArray
    ) -> _Front:
        """The front of the prefix `stop`, by groups from the points at the prefixes `starts`."""
        if not len(starts):
            return _UNREACHED
        counts = [len(fronts[start].selected) for start in starts]
        start = np.repeat(starts, counts)
        selected, link_free = self._add_group(
            np.concatenate([fronts[start].selected for start in starts]),
            np.concatenate([fronts[start].link_free for start in starts]),
            start,
            stop,
        )
        before = np.concatenate([np.arange(count) for count in counts])
        points = np.flatnonzero(_in_time(selected, link_free, *deadlines))
        points = points[_undominated(selected[points], link_free[points])]
        return _Front(selected, link_free, start, before).at(points)

    def _add_group(
        self, selected: FloatArray, link_free: FloatArray, start: IntArray | int, stop: int
    ) -> tuple[FloatArray, FloatArray]:
        """Both clocks after the groups `[start, stop)`."""
        selected = selected + self.select[start, stop]
        begin = np.maximum(link_free, self.ready[stop - 1] + selected)
        end = begin + self.communicate[start, stop]
        # The next group waits for its gradient: that the link is free before gains nothing.
        return selected, np.maximum(end, self._waits[stop] + selected)

    @cached_property
    def _waits(self) -> FloatArray:
        return np.append(self.ready, 0.0)  # (layers + 1,)

    @cached_property
    def _least_selected(self) -> FloatArray:
        """The least seconds in which each prefix can be selected."""  # (layers + 1,)
        least = np.zeros(len(self.select))
        for stop in range(1, len(least)):
            least[stop] = (least[:stop] + self.select[:stop, stop]).min()
        return least

    def _deadlines(self, latest: float) -> FloatArray:
        """For every prefix, how late `selected` and `link_free` may be to end by `latest`.

        Bounds: each clock's deadline supposes that the other is as early as it can be. Prefixes
        that cannot be in time have negative ones.
        """  # (2, layers + 1)
        selected, link_free = np.full((2, len(self.select)), -np.inf)
        selected[-1] = link_free[-1] = latest
        for prefix in range(len(self.ready) - 1, -1, -1):
            stops = slice(prefix + 1, None)
            begin = link_free[stops] - self.communicate[prefix, stops]
            selected_after = np.minimum(selected[stops], begin - self.ready[prefix:])
            in_time = selected_after >= self._least_selected[stops]
            if in_time.any():
                link_free[prefix] = begin[in_time].max()
                selected[prefix] = (selected_after - self.select[prefix, stops])[in_time].max()
        return np.stack((selected, link_free))

    def without_idle_cuts(
        self, groups: list[tuple[int, int]], latest: float
    ) -> list[tuple[int, int]]:
        """Merge neighbours, from the first on, where the end is by `latest` all the same."""
        deadlines = self._deadlines_along(groups, latest)
        kept = []
        start, clocks = 0, (np.zeros(()), np.zeros(()))
        for (_, cut), (_, stop) in pairwise(groups):
            merged = self._add_group(*clocks, start, stop)
            if np.all(np.less_equal(merged, deadlines[stop])):
                continue
            kept.append((start, cut))
            start, clocks = cut, self._add_group(*clocks, start, cut)
        return [*kept, (start, len(self.ready))]

    def _deadlines_along(
        self, groups: list[tuple[int, int]], latest: float
    ) -> dict[int, tuple[float, float]]:
        """How late both clocks may be after each prefix where a group begins, and at the end."""
        selected, link_free = np.inf, latest
        deadlines = {len(self.ready): (selected, link_free)}
        for start, stop in reversed(groups):
            link_free -= self.communicate[start, stop]
            selected = min(selected, link_free - self.ready[stop - 1]) - self.select[start, stop]
            deadlines[start] = selected, link_free
        return deadlines


def _in_time(
    selected: FloatArray, link_free: FloatArray, selected_by: float, link_free_by: float
) -> NDArray[np.bool_]:
    return (selected <= selected_by) & (link_free <= link_free_by)


def _undominated(selected: FloatArray, link_free: FloatArray) -> IntArray:
    """Points that free the link earlier than all of less or equal `selected`, by `selected`."""
    order = np.argsort(selected, kind="stable")
    earliest_before = np.minimum.accumulate(np.append(np.inf, link_free[order]))[:-1]
    return order[link_free[order] < earliest_before]


def _thinned(front: _Front, width: int | None) -> _Front:
    """At most `width` points, spread evenly over the front, with both ends."""
    count = len(front.selected)
    if width is None or count <= width:
        return front
    return front.at(np.linspace(0, count - 1, width).round().astype(np.int64))


def _trace_back(fronts: list[_Front]) -> list[tuple[int, int]]:
    """The groups that lead to the earliest end."""
    stop = len(fronts) - 1
    point = int(fronts[stop].link_free.argmin())
    groups = []
    while stop:
        front = fronts[stop]
        start = int(front.start[point])
        groups.append((start, stop))
        stop, point = start, int(front.before[point])
    return groups[::-1]
