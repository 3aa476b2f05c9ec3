"""Merge groups, their pieces and the order of all-gathers, which hide behind the next forward too.

By Jackson's rule the all-gather would go next, of those that could, whose group forward uses first
(see `cross_timeline`). Which those are depends on the link to the millisecond, and an order that
ranks share has to be made before. So it is one that suits any link: an *early* share of each
group's pieces goes as backward makes them, into its gaps; the others follow as forward uses them.
Like Jackson's rule this fills a gap with what has just been reduced, and leaves some of every layer
to forward, which can then begin at once and goes on as fast as the rest arrives. (Whole groups that
are early, the first ones, are used last; those that are used just before them then come when there
is no forward left to hide behind: 3 to 6 % of an iteration. And an order made by Jackson's rule on
one link lets another idle, or sends what is used last before what is used first: 8 to 18 % where
the two differ by a quarter.)

How large the share is, and how to cut into groups and pieces, is searched for: groups of many sizes
and those of all planners; then cuts that pay nothing are undone. Each is judged by its mean on
links that take somewhat less or more time than was measured. That is not exact, but
`CrossTimeline.lower_bound_seconds` says how far off it is at most: on the profiles of ResNet-50,
ViT-Base and GPT-2 at 1 Gbit/s 2.4 %, nearly all of it start-ups of pieces that travel well.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import product
from operator import attrgetter
from statistics import fmean

import numpy as np

from lightning_mgwfbp.plan.cross_link import Jobs, run_link
from lightning_mgwfbp.plan.cross_timeline import CrossProblem
from lightning_mgwfbp.plan.halves import HalvesCost
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.planners import PLANNERS, Optimal, Planner, Threshold
from lightning_mgwfbp.plan.profile import ModelProfile

Groups = tuple[tuple[int, int], ...]

_HALVINGS = 10  # groups and pieces are from all bytes down to a thousandth of them
_STARTS = 3  # from the best so many, cuts are undone
_EARLY = (0.0, 0.2, 0.3, 0.4, 0.5, 0.7)  # shares of each group's pieces that are gathered early
_LINKS = (0.85, 1.0, 1.2)  # seconds of a message in training, as multiples of those measured
# What a message takes the host to launch and end, and so must shorten the iteration by:
# [Note: pieces] in exchange/decoupled.py.
_HOST_SECONDS = 1e-4
# A reduce-scatter queues behind the few all-gathers that are under way, and a piece is of use only
# whole: so pieces are bounded, unless start-ups take more than a share of such a piece.
_MOST_PIECE_NBYTES = 2.0**21
_START_UP_SHARE = 0.25


def plan_cross_iteration(profile: ModelProfile, cost: HalvesCost, planner: Planner) -> MergePlan:
    """The groups of `planner`, cut into pieces for the shortest iteration.

    Where that is the exact planner of the other schedule, groups too are chosen for the shortest
    iteration; the plan's planner is then called `cross_iteration`.
    """
    search = _Search(CrossProblem.of(profile, cost))
    if isinstance(planner, Optimal):
        best, name = search.best_of(_groupings(profile, cost)), "cross_iteration"
    else:
        best, name = search.with_pieces(tuple(planner.groups(profile, cost))), planner.name
    return MergePlan(
        profile.names,
        best.groups,
        name,
        pieces=tuple(best.jobs.pieces),
        gather_order=best.gather_order,
    )


def _groupings(profile: ModelProfile, cost: HalvesCost) -> set[Groups]:
    nbytes = int(profile.nbytes.sum())
    thresholds = (Threshold(nbytes >> halvings) for halvings in range(_HALVINGS + 1))
    return {tuple(p.groups(profile, cost)) for p in (*PLANNERS.values(), *thresholds)}


@dataclass(frozen=True)
class _Candidate:
    """A plan; of two the one of less `penalty` is better."""

    groups: Groups
    piece_nbytes: float
    """The most bytes of a piece."""
    early: float
    """The share of each group's pieces that is gathered early."""
    jobs: Jobs
    gather_order: tuple[int, ...]
    penalty: float


_penalty = attrgetter("penalty")


@dataclass(frozen=True)
class _Search:
    problem: CrossProblem

    def best_of(self, groupings: Iterable[Groups]) -> _Candidate:
        """Where the best of `groupings` lead to, with their idle cuts undone."""
        starts = nsmallest(_STARTS, map(self.with_pieces, groupings), key=_penalty)
        best = min(map(self.without_idle_cuts, starts), key=_penalty)
        return self.with_pieces(best.groups)

    def with_pieces(self, groups: Groups) -> _Candidate:
        """`groups` with the best size of pieces and share of early ones."""
        choices = product(self._piece_nbytes(), _EARLY)
        return min((self._candidate(groups, *choice) for choice in choices), key=_penalty)

    def _piece_nbytes(self) -> Iterator[float]:
        communicate, total = self.problem.cost.communicate, float(self.problem.offsets[-1])
        nbytes = _MOST_PIECE_NBYTES
        while nbytes < total and communicate(0.0) > _START_UP_SHARE * communicate(nbytes):
            nbytes *= 2
        nbytes = max(1.0, min(nbytes, total))
        yield nbytes
        while (nbytes := nbytes / 2) >= max(1.0, total / 2**_HALVINGS):
            yield nbytes

    def without_idle_cuts(self, candidate: _Candidate) -> _Candidate:
        """Merge neighbours, from the first on, as long as that gains something or costs nothing."""
        groups, index = candidate.groups, 0
        while index < len(groups) - 1:
            (start, _), (_, stop) = groups[index : index + 2]
            merged = (*groups[:index], (start, stop), *groups[index + 2 :])
            trial = self._candidate(merged, candidate.piece_nbytes, candidate.early)
            if trial.penalty <= candidate.penalty:
                candidate, groups = trial, merged
            else:
                index += 1
        return candidate

    def _candidate(self, groups: Groups, piece_nbytes: float, early: float) -> _Candidate:
        offsets = self.problem.offsets
        nbytes = np.diff(offsets[[0, *(stop for _, stop in groups)]])
        pieces = np.maximum(1, np.ceil(nbytes / piece_nbytes)).astype(int)
        jobs = self.problem.jobs(groups, pieces.tolist())
        order = jobs.gather_order(early)
        seconds = [
            self.problem.iteration_seconds(jobs, run_link(jobs.on_link(link), order))
            for link in _LINKS
        ]
        penalty = fmean(seconds) + _HOST_SECONDS * 2 * sum(jobs.pieces)
        return _Candidate(groups, piece_nbytes, early, jobs, order, penalty)
