"""From what each rank measured to one plan for all: plan on rank 0, broadcast.

Ranks measure different times. Were each to plan by its own, their plans could differ, and ranks
with different plans wait for each other for ever; so the *plan* is what travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from lightning_mgwfbp.engine.layout import unmeasured_profile
from lightning_mgwfbp.engine.measured_costs import WireNbytes
from lightning_mgwfbp.exchange.compressors import Compressor
from lightning_mgwfbp.exchange.methods import ExchangeMethod, kind_of
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import (
    CheaperCost,
    Cost,
    HalvesCost,
    MergePlan,
    ModelProfile,
    Planner,
    choose_densities,
    largest_hidden_densities,
    nbytes_at_densities,
    plan_cross_iteration,
    with_forward_times,
)


def agree_on_profile(
    transport: Transport,
    carried: Mapping[str, Tensor],
    ready_seconds: dict[str, float],
    forward_seconds: float,
    first_use_seconds: dict[str, float],
    model: str,
) -> ModelProfile:
    """Return the profile all ranks plan by: a gradient is ready when the slowest rank has it.

    Args:
        transport: joins the ranks.
        carried: what each parameter puts into its bucket, by name, in the order of registration.
        ready_seconds: this rank's times from the beginning of backward; parameters that never
            fired may be absent and come last.
        forward_seconds: this rank's time for one forward.
        first_use_seconds: this rank's times from the beginning of forward to the first use of each
            parameter; empty where they were not measured, and otherwise parameters that are absent
            are taken to be used at once.
        model: its name, for the record.
    """
    mine = ready_seconds, forward_seconds, first_use_seconds
    everyone = transport.all_gather_object(mine, key="profiles")
    slowest = _slowest(ready for ready, _, _ in everyone)
    end = max(slowest.values(), default=0.0)
    unmeasured = unmeasured_profile(list(carried), list(carried.values()), set(carried))
    # sorted() is stable: ties, and what never fired, keep the reversed order of registration
    layers = sorted(unmeasured.layers, key=lambda layer: slowest.get(layer.name, end))
    ready = [slowest.get(layer.name, end) for layer in layers]
    backward = [now - before for now, before in zip(ready, [0.0, *ready[:-1]], strict=True)]
    profile = ModelProfile(
        model=model,
        layers=tuple(
            replace(layer, backward_seconds=b) for layer, b in zip(layers, backward, strict=True)
        ),
        forward_seconds=max(forward for _, forward, _ in everyone),
        note=f"measured on {transport.world_size} ranks",
    )
    first_use = _slowest(used for _, _, used in everyone)
    return with_forward_times(profile, first_use, profile.forward_seconds) if first_use else profile


def _slowest(everyone: Iterable[Mapping[str, float]]) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for theirs in everyone:
        for name, seconds in theirs.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    return slowest


def agree_on_plan(
    transport: Transport,
    profile: ModelProfile,
    planner: Planner,
    cost: Cost,
    method: ExchangeMethod | None,
) -> MergePlan:
    """Plan on rank 0 and give every rank its plan, with the density at which each group travels."""
    plan = None
    if transport.rank == 0:
        plan = (
            plan_cross_iteration(profile, cost, planner)
            if isinstance(cost, HalvesCost)
            else planner.plan(profile, cost)
        )
        if isinstance(cost, CheaperCost) and isinstance(method, Compressor):
            plan = _with_densities(profile, plan, cost, method)
        plan = replace(plan, compressor=kind_of(method))
    plan = transport.broadcast_object(plan, 0, key="plan")
    assert plan is not None
    return plan


def _with_densities(
    profile: ModelProfile, plan: MergePlan, cost: CheaperCost, method: Compressor
) -> MergePlan:
    if not method.plan_chooses_density:
        return choose_densities(profile, plan, cost)

    cost_at = partial(_at_density, cost, method)
    return largest_hidden_densities(profile, plan, cost_at, cost.dense, method.settled_density)


def _at_density(cost: CheaperCost, method: Compressor, density: float) -> Cost:
    return replace(cost.sparse, wire_nbytes=WireNbytes(method, density))


def wire_nbytes(
    profile: ModelProfile, plan: MergePlan, cost: Cost, method: ExchangeMethod | None
) -> tuple[int, ...]:
    """Bytes of each merge group's message, of a plan of `agree_on_plan`'s."""
    if not plan.densities:
        nbytes = cost.nbytes(cost.group_sizes(profile, plan.groups)).tolist()
    else:
        assert isinstance(cost, CheaperCost)
        assert isinstance(method, Compressor)
        nbytes = nbytes_at_densities(profile, plan, cost, partial(_at_density, cost, method))
    return tuple(map(round, nbytes))


def after_backward(profile: ModelProfile) -> ModelProfile:
    """`profile` for an exchange that can start nothing before backward has ended."""
    seconds = [profile.backward_seconds, *[0.0] * (len(profile.layers) - 1)]
    layers = zip(profile.layers, seconds, strict=True)
    return replace(profile, layers=tuple(replace(p, backward_seconds=b) for p, b in layers))
