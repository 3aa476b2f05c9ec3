"""How long an iteration takes whose all-gathers may still be on the link in the next forward.

An all-reduce is cut into its halves. Reduce-scatters run during backward; a parameter's all-gather
needs to be done only when the next forward first uses it. So the time that counts runs from the
beginning of backward to the end of the next forward. Let C_i be when the last all-gather of
parameter i's merge group ends, and its *tail* q_i the seconds of forward from its first use on.
Forward goes on as the parameters arrive, and does not begin before backward has ended, so

    iteration = max(backward + forward, max over the parameters i of C_i + q_i).

This is the scheduling problem of one machine, the link, whose jobs have a head (until a group's
last gradient exists), a length (its reduce-scatters, then its all-gathers) and a tail. A plan says
what the jobs are, and in which order all-gathers go: see `cross_link`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.cross_link import Jobs, Message, run_link
from lightning_mgwfbp.plan.forward import forward_tails
from lightning_mgwfbp.plan.halves import HalvesCost
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.profile import ModelProfile, Span

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class CrossTimeline:
    """What a plan is predicted to do; all seconds count from the start of backward."""

    spans: tuple[Span, ...]
    """Every `reduce_scatter` and `all_gather`, one after another; `index` is the merge group's."""
    backward_seconds: float
    forward_seconds: float
    iteration_seconds: float
    """From the beginning of backward to the end of the next forward."""
    lower_bound_seconds: float
    """An iteration that no plan undercuts."""

    @property
    def exposed_seconds(self) -> float:
        """What communication adds to backward and forward."""
        return self.iteration_seconds - (self.backward_seconds + self.forward_seconds)


def simulate_cross_iteration(
    profile: ModelProfile, plan: MergePlan, cost: HalvesCost
) -> CrossTimeline:
    """Predict the timeline of `plan`, on a link as in `cross_link`.

    ValueError if the plan has no pieces, or lists other parameters than `profile`.
    """
    plan.check_names(profile.names)
    if plan.names != profile.names:
        raise ValueError("plan must list the parameters in the profile's order: plan again")
    if not plan.pieces:
        raise ValueError("plan must have pieces: make it with `plan_cross_iteration`")
    problem = CrossProblem.of(profile, cost)
    jobs = problem.jobs(plan.groups, plan.pieces)
    messages = list(run_link(jobs, plan.gather_order))
    return CrossTimeline(
        spans=tuple(Span(*message) for message in messages),
        backward_seconds=profile.backward_seconds,
        forward_seconds=profile.forward_seconds,
        iteration_seconds=problem.iteration_seconds(jobs, messages),
        lower_bound_seconds=problem.lower_bound_seconds(),
    )


@dataclass(frozen=True)
class CrossProblem:
    """What all plans for a profile have in common."""

    ready: FloatArray  # (layers,)
    tails: FloatArray  # (layers,)
    offsets: FloatArray  # (layers + 1,), wire bytes of all gradients before
    computing_seconds: float
    cost: HalvesCost

    @classmethod
    def of(cls, profile: ModelProfile, cost: HalvesCost) -> "CrossProblem":
        return cls(
            profile.ready_seconds,
            forward_tails(profile),
            cost.offsets(profile),
            profile.backward_seconds + profile.forward_seconds,
            cost,
        )

    def jobs(self, groups: Sequence[tuple[int, int]], pieces: Sequence[int]) -> Jobs:
        """What the link has to do for `groups`, each cut into so many pieces."""
        starts, stops = np.array(groups).T
        nbytes = (self.offsets[stops] - self.offsets[starts]) / np.array(pieces)
        return Jobs(
            ready=self.ready[stops - 1].tolist(),
            pieces=list(pieces),
            scatter=self.cost.reduce_scatter(nbytes).tolist(),
            gather=self.cost.all_gather(nbytes).tolist(),
            tails=np.maximum.reduceat(self.tails, starts).tolist(),
        )

    def iteration_seconds(self, jobs: Jobs, messages: Iterable[Message]) -> float:
        """From the beginning of backward to the end of the next forward."""
        ends = (end + jobs.tails[g] for what, g, _, end in messages if what == "all_gather")
        return max(self.computing_seconds, *ends)

    def lower_bound_seconds(self) -> float:
        """An iteration that no groups, pieces and order undercut.

        Take any set of parameters. No message that carries some of it begins before the first of
        its gradients exists; those that carry it take the link at least the seconds that no
        messages undercut; and when the last of it has arrived, at least the shortest of its tails
        is still to come. So for every set

            iteration >= min of its ready + least seconds of its bytes + min of its tails.

        The largest such sum is that of a set of all parameters which are ready no sooner than one
        time and have tails no shorter than another. On a link without start-ups that could
        interrupt its messages a schedule would reach it: Jackson's, the longest tail first.
        """
        by_tail = np.argsort(-self.tails, kind="stable")
        sizes, tails = np.diff(self.offsets)[by_tail], self.tails[by_tail]
        bound = self.computing_seconds
        for first in range(len(by_tail)):
            # the k-th of those that are ready since `first` is, the longest tail first
            member = by_tail >= first
            nbytes = np.cumsum(sizes[member])
            least = self.cost.least_seconds_within(nbytes, float(self.offsets[-1]))
            bound = max(bound, float((self.ready[first] + least + tails[member]).max()))
        return bound
