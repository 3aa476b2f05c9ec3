"""Which gradients to merge: from what was measured and what messages cost, a merge plan.

Planners see only a profile and a `Cost`. Published names: wfbp (Poseidon, ATC'17), single
(SyncEASGD, SC'17), mgwfbp (MG-WFBP, INFOCOM'19 and TPDS'21; where groups are selected before they
are sent it is OMGS-SGD, INFOCOM'20).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from lightning_mgwfbp.plan.costs import Cost
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.optimal import optimal_groups
from lightning_mgwfbp.plan.pareto import pareto_groups
from lightning_mgwfbp.plan.profile import ModelProfile
from lightning_mgwfbp.plan.records import require_count


class Planner(ABC):
    """A rule that cuts the gradients, in backward order, into merge groups."""

    name: ClassVar[str]

    def plan(self, profile: ModelProfile, cost: Cost) -> MergePlan:
        """The merge plan for `profile` on a link that costs `cost`."""
        return MergePlan(profile.names, tuple(self.groups(profile, cost)), self.name)

    @abstractmethod
    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        """The merge groups as `[start, stop)` pairs."""


@dataclass(frozen=True)
class WFBP(Planner):
    """Wait-free back-propagation: every gradient alone, as soon as it exists."""

    name: ClassVar[str] = "wfbp"

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        return ((index, index + 1) for index in range(len(profile.layers)))


@dataclass(frozen=True)
class Single(Planner):
    """One message after backward: the fewest start-ups, and nothing overlaps."""

    name: ClassVar[str] = "single"

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        return [(0, len(profile.layers))]


@dataclass(frozen=True)
class Threshold(Planner):
    """A group closes when its gradients reach `nbytes`, as in DDP and Horovod; 0 is wfbp."""

    nbytes: int = 25 * 2**20
    name: ClassVar[str] = "threshold"

    def __post_init__(self) -> None:
        require_count("`Threshold(nbytes=...)`", self.nbytes)

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        start = filled = 0
        for index, nbytes in enumerate(profile.nbytes.tolist()):
            filled += nbytes
            if filled >= self.nbytes or index == len(profile.layers) - 1:
                yield start, index + 1
                start, filled = index + 1, 0


@dataclass(frozen=True)
class MGWFBP(Planner):
    """The published greedy: merge the next gradient while waiting for it costs less than it saves.

    The group so far could be sent at `begin`, the later of its selection's end and the link. Merged
    with the next gradient, which exists at `ready`, it would be selected by `ready + s(x + y)`, but
    the next one's own selection is saved. So it is merged in if

        ready + s(x + y) - s(y) - begin < t(x) + t(y) - t(x + y),

    where for an alpha-beta link the right side is alpha. Without selections, s = 0, this is
    MG-WFBP, with them OMGS-SGD. One pass, O(L); not optimal, since it looks one gradient ahead.
    """

    name: ClassVar[str] = "mgwfbp"

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        offsets = cost.offsets(profile)
        alone = offsets[1:] - offsets[:-1]
        selects, communicates = cost.select(alone).tolist(), cost.communicate(alone).tolist()
        readies = profile.ready_seconds.tolist()
        start, select, communicate = 0, selects[0], communicates[0]
        selected = link_free = 0.0  # by the groups before
        begin = readies[0] + select
        for index in range(1, len(readies)):
            ready = readies[index] + selected
            merged = offsets[index + 1] - offsets[start]
            merged_select, merged_communicate = cost.select(merged), cost.communicate(merged)
            wait = ready + (float(merged_select) - selects[index]) - begin
            if wait < communicate + communicates[index] - float(merged_communicate):
                select, communicate = float(merged_select), float(merged_communicate)
            else:
                yield start, index
                selected, link_free = selected + select, begin + communicate
                start, select, communicate = index, selects[index], communicates[index]
            begin = max(link_free, readies[index] + (selected + select))
        yield start, len(readies)


@dataclass(frozen=True)
class Optimal(Planner):
    """The exact plan: communication ends as early as any plan's.

    With the fewest groups, unless some are selected first (see `pareto`).
    """

    name: ClassVar[str] = "optimal"

    def groups(self, profile: ModelProfile, cost: Cost) -> Iterable[tuple[int, int]]:
        ready, offsets = profile.ready_seconds, cost.offsets(profile)
        if cost.selects:
            return pareto_groups(ready, offsets, cost)
        return optimal_groups(ready, offsets, cost.communicate)


PLANNERS: dict[str, Planner] = {
    planner.name: planner for planner in (WFBP(), Single(), Threshold(), MGWFBP(), Optimal())
}


def resolve_planner(planner: str | Planner) -> Planner:
    """The planner of that name ("auto": the exact one), or the planner itself."""
    if isinstance(planner, Planner):
        return planner
    if planner == "auto":
        return PLANNERS["optimal"]
    if planner not in PLANNERS:
        raise ValueError(
            f"planner must be a Planner or one of {', '.join(['auto', *PLANNERS])}, got {planner!r}"
        )
    return PLANNERS[planner]
