"""How much of each merge group travels: what is cheaper whole, and what hides at a larger density.

The groups are a plan's; here only its `densities` are chosen.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.costs import Cost
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.profile import ModelProfile
from lightning_mgwfbp.plan.records import require_density
from lightning_mgwfbp.plan.sparse_costs import CheaperCost
from lightning_mgwfbp.plan.timeline import simulate

WHOLE = 1.0
_PRECISION = 1e-3  # a density is the largest but for this share of itself


def choose_densities(profile: ModelProfile, plan: MergePlan, cost: CheaperCost) -> MergePlan:
    """The plan with the groups marked as whole that `cost` says are cheaper dense."""
    dense = cost.is_dense(cost.group_sizes(profile, plan.groups))
    densities = tuple(WHOLE if whole else None for whole in dense) if dense.any() else ()
    return replace(plan, densities=densities)


def largest_hidden_densities(
    profile: ModelProfile,
    plan: MergePlan,
    cost_at: Callable[[float], Cost],
    dense: Cost,
    floor: float,
) -> MergePlan:
    """The plan with each group at the largest density, from `floor` on, that costs no time.

    With `floor` everywhere each message begins at some time. A group's density may grow until its
    message ends when the next one begins then: so none begins later than it would, and the end of
    communication is no later either. Where an all-reduce of the whole group is through by then, or
    no later than its message at the floor, the group goes whole, and need not be selected. Nothing
    hides the last group: it keeps the floor, unless whole it is through no later.

    Args:
        cost_at: what a density costs. Sizes must not depend on it; a larger one must not take less
            time to send, nor more to select.
        dense: what the all-reduce of whole gradients costs.
        floor: the least density, in (0, 1].
    """
    require_density("`floor`", floor)
    at_floor = simulate(profile, plan, cost_at(floor))
    limits = [*(span.begin_seconds for span in at_floor.spans[1:]), -np.inf]
    sizes = cost_at(floor).group_sizes(profile, plan.groups)
    whole_seconds = dense.communicate(dense.group_sizes(profile, plan.groups)).tolist()
    readies = [float(profile.ready_seconds[stop - 1]) for _, stop in plan.groups]
    clocks = _Clocks()
    densities = []
    for ready, size, seconds, limit in zip(readies, sizes, whole_seconds, limits, strict=True):
        sparse = partial(_sparse_clocks, cost_at, size, clocks, ready)
        whole = clocks.after(ready, 0.0, seconds)
        if whole.link_free <= max(limit, sparse(floor).link_free):
            density, clocks = WHOLE, whole
        else:
            density = _largest(sparse, floor, limit)
            clocks = sparse(density)
        densities.append(density)
    return replace(plan, densities=tuple(densities))


def nbytes_at_densities(
    profile: ModelProfile, plan: MergePlan, cost: CheaperCost, cost_at: Callable[[float], Cost]
) -> list[float]:
    """Bytes of each group's message, at the densities that the plan has chosen.

    Args:
        cost_at: what a density costs; sizes must not depend on it.
    """
    whole = cost.dense.nbytes(cost.dense.group_sizes(profile, plan.groups)).tolist()
    sizes = cost.sparse.group_sizes(profile, plan.groups)
    return [
        nbytes
        if density == WHOLE
        else float((cost.sparse if density is None else cost_at(density)).nbytes(size))
        for nbytes, size, density in zip(whole, sizes, plan.density_of_groups, strict=True)
    ]


class _Clocks(NamedTuple):
    """As in `timeline`: seconds selected so far, and when the link is free."""

    selected: float = 0.0
    link_free: float = 0.0

    def after(self, ready: float, select: float, communicate: float) -> "_Clocks":
        """When a group that is complete at `ready`, without selections, has been sent."""
        selected = self.selected + select
        return _Clocks(selected, max(self.link_free, ready + selected) + communicate)


def _sparse_clocks(
    cost_at: Callable[[float], Cost],
    size: NDArray[np.float64],
    clocks: _Clocks,
    ready: float,
    density: float,
) -> _Clocks:
    cost = cost_at(density)
    return clocks.after(ready, float(cost.select(size)), float(cost.communicate(size)))


def _largest(clocks_at: Callable[[float], _Clocks], floor: float, limit: float) -> float:
    """The largest density from `floor` on whose message ends by `limit`, else the floor."""
    low, high = floor, WHOLE
    if clocks_at(floor).link_free > limit:
        return floor
    while high > low * (1 + _PRECISION):
        middle = (low * high) ** 0.5
        if clocks_at(middle).link_free <= limit:
            low = middle
        else:
            high = middle
    return low
