"""The link as a machine: which half of which message is on it when.

It takes one message at a time, and finishes it. Reduce-scatters follow each other in the order of
the groups, each from when its group's last gradient exists. All-gathers have an order of their own,
the same on all ranks. They fill the gaps between reduce-scatters, and what is left follows: where
both could go the reduce-scatter does. (In training it comes behind one or two all-gathers, so this
is a simplification.)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

Message = tuple[str, int, float, float]  # the fields of a `Span`; a tuple is sooner made


@dataclass(frozen=True)
class Jobs:
    """What the link has to do, by merge group; all pieces of a group are of the same size."""

    ready: list[float]
    """When the group's last gradient exists, in seconds since backward began."""
    pieces: list[int]
    """How many messages each half is cut into."""
    scatter: list[float]
    """Seconds of one piece's reduce-scatter."""
    gather: list[float]
    """Seconds of one piece's all-gather."""
    tails: list[float]
    """Seconds of the next forward from the group's first use on."""

    def gather_order(self, early: float) -> tuple[int, ...]:
        """A share of the pieces of every group as they are, then the others as forward uses them.

        Of several used at once the last is first: where forward takes no time, or none that is
        known, it is so the reverse of backward.

        Args:
            early: the share; groups of few pieces take turns.
        """
        up_to = [int(early * pieces) for pieces in accumulate(self.pieces, initial=0)]
        first = [stop - start for start, stop in pairwise(up_to)]
        groups = range(len(self.pieces))
        by_use = sorted(groups, key=lambda group: (self.tails[group], group), reverse=True)
        return (
            *(group for group in groups for _ in range(first[group])),
            *(group for group in by_use for _ in range(self.pieces[group] - first[group])),
        )

    def on_link(self, factor: float) -> "Jobs":
        """The same where messages take `factor` of the time."""
        return replace(
            self,
            scatter=[factor * seconds for seconds in self.scatter],
            gather=[factor * seconds for seconds in self.gather],
        )


def run_link(jobs: Jobs, gather_order: Sequence[int]) -> Iterator[Message]:
    """Yield the messages as they follow."""
    scatters = [group for group, pieces in enumerate(jobs.pieces) for _ in range(pieces)]
    gathers = list(reversed(gather_order))  # the next one is the last
    reduced = [0] * len(jobs.pieces)  # pieces of each group that are not gathered yet
    now = 0.0
    for scatter in (*scatters, None):
        ready = math.inf if scatter is None else jobs.ready[scatter]
        while now < ready and gathers and reduced[gathers[-1]]:
            gather = gathers.pop()
            reduced[gather] -= 1
            begin, now = now, now + jobs.gather[gather]
            yield "all_gather", gather, begin, now
        if scatter is not None:
            begin = max(now, ready)
            now = begin + jobs.scatter[scatter]
            reduced[scatter] += 1
            yield "reduce_scatter", scatter, begin, now
