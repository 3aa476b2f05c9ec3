"""The exact merge plan: the earliest end of communication, and the fewest groups that reach it.

The earliest end of the first j gradients is, with `ready_i` when gradient i exists and t(.) the
seconds of a message,

    f(0) = 0,    f(j) = min over i < j of  max(f(i), ready_{j-1}) + t(size of i..j-1).

This alone does not give the fewest groups: where the link waits for a gradient anyway, the groups
before may end later than f and be fewer. So a second pass, from the end, finds for each prefix how
late the link may become free without delaying the end, and a lower bound on the groups still
needed. The third looks for a plan of as many groups as the bound says, then of one more, and so on:
it extends, group by group, the prefixes that can still make it. The bound is nearly always met at
once, so that all three passes are O(L^2), vectorised.

Nothing is assumed of t(.): it may be measured, with steps and dips.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Level = tuple[IntArray, FloatArray]  # prefixes in ascending order, and when the link is free after

# Ends that differ by a smaller share are equal: t(x) + t(y) and t(x + y) are, without a latency,
# but not after rounding, and a group more for the last bit of a prediction is no gain.
ROUNDING = 1e-12
_UNREACHABLE = np.iinfo(np.int64).max


def optimal_groups(
    ready: FloatArray, offsets: FloatArray, communicate: Callable[[FloatArray], FloatArray]
) -> list[tuple[int, int]]:
    """The fewest `[start, stop)` groups that end within `ROUNDING` of the earliest possible end.

    Shapes: `ready` (layers,) seconds; `offsets` (layers + 1,), the size of all gradients before.
    """
    search = _Search(ready, offsets, communicate)
    latest, remaining = search.deadlines(search.earliest_ends())
    for total in count(int(remaining[0])):
        levels = search.extend(latest, remaining, total)
        if levels is not None:
            return search.trace_back(levels)
    raise AssertionError("the earliest end was found, so some number of groups reaches it")


@dataclass(frozen=True)
class _Search:
    """The three passes. A *prefix* i stands for "the first i gradients are sent".

    Every end is summed as the simulator does, so that those found here are those it will predict.
    """

    ready: FloatArray  # (layers,)
    offsets: FloatArray  # (layers + 1,)
    communicate: Callable[[FloatArray], FloatArray]

    def earliest_ends(self) -> FloatArray:
        """f(j) for every prefix."""  # (layers + 1,)
        earliest = np.zeros(len(self.offsets))
        for stop in range(1, len(earliest)):
            begin = np.maximum(earliest[:stop], self.ready[stop - 1])
            seconds = self.communicate(self.offsets[stop] - self.offsets[:stop])
            earliest[stop] = (begin + seconds).min()
        return earliest

    def deadlines(self, earliest: FloatArray) -> tuple[FloatArray, IntArray]:
        """For every prefix: how late the link may be free, and how many groups are needed at least.

        The bound lets the link be free as early as possible after each group, however many groups
        that took. Prefixes that cannot be in time are out of reach.
        """
        latest = np.full(len(earliest), -np.inf)
        remaining = np.full(len(earliest), _UNREACHABLE)
        latest[-1], remaining[-1] = earliest[-1] * (1 + ROUNDING), 0
        for prefix in range(len(earliest) - 2, -1, -1):
            stops = slice(prefix + 1, None)
            begin = latest[stops] - self.communicate(self.offsets[stops] - self.offsets[prefix])
            in_time = begin >= np.maximum(self.ready[prefix:], earliest[prefix])
            if in_time.any():
                latest[prefix] = begin[in_time].max()
                remaining[prefix] = 1 + remaining[stops][in_time].min()
        return latest, remaining

    def extend(self, latest: FloatArray, remaining: IntArray, total: int) -> list[Level] | None:
        """Where one, two, ... groups can lead on the way to `total`; None if not to the end.

        A level holds the prefixes that its number of groups reaches earlier than fewer do.
        """
        # The next group waits for its gradient: that the link is free before gains nothing.
        waits = np.append(self.ready, 0.0)
        best = np.nextafter(latest, np.inf)
        prefixes, link_free = np.zeros(1, dtype=np.int64), np.zeros(1)
        levels = []
        for groups in range(1, total + 1):
            levels.append((prefixes, link_free))
            stops = np.flatnonzero(remaining <= total - groups)
            ends = np.maximum(self._one_more_group(prefixes, link_free, stops), waits[stops])
            gained = ends < best[stops]
            prefixes, link_free = stops[gained], ends[gained]
            best[prefixes] = link_free
        return levels if len(prefixes) else None

    def _one_more_group(
        self, prefixes: IntArray, link_free: FloatArray, stops: IntArray
    ) -> FloatArray:
        """The earliest end, at each of the `stops`, of a group that begins at one of `prefixes`."""
        ready, offsets = self.ready[stops - 1], self.offsets[stops]
        earliest = np.full(len(stops), np.inf)
        later = np.searchsorted(stops, prefixes, side="right")
        for first, prefix, free in zip(later, prefixes, link_free, strict=True):
            seconds = self.communicate(offsets[first:] - self.offsets[prefix])
            ends = np.maximum(ready[first:], free) + seconds
            np.minimum(earliest[first:], ends, out=earliest[first:])
        return earliest

    def trace_back(self, levels: list[Level]) -> list[tuple[int, int]]:
        """The groups that lead through the levels to the end."""
        stop = len(self.ready)
        groups = []
        for prefixes, link_free in reversed(levels):
            before = int(np.searchsorted(prefixes, stop))
            begin = np.maximum(link_free[:before], self.ready[stop - 1])
            seconds = self.communicate(self.offsets[stop] - self.offsets[prefixes[:before]])
            start = int(prefixes[(begin + seconds).argmin()])
            groups.append((start, stop))
            stop = start
        return groups[::-1]
