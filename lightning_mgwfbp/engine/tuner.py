"""From what each rank measured to one plan for all: measure, fit, plan on rank 0, broadcast.

Ranks measure different times. Were each to plan by its own, their plans could differ, and ranks
with different plans wait for each other for ever; so the *plan* is what travels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mgwfbp.engine.layout import unmeasured_profile
from lightning_mgwfbp.exchange.buckets import real_dtype
from lightning_mgwfbp.exchange.compressors import Cast, Compressor
from lightning_mgwfbp.exchange.methods import ExchangeMethod
from lightning_mgwfbp.exchange.power_sgd import PowerSGD
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.measure.collectives import time_all_gather, time_all_reduce
from lightning_mgwfbp.measure.compression import time_compression
from lightning_mgwfbp.plan import (
    AlphaBeta,
    CheaperCost,
    Cost,
    DenseCost,
    LinkFit,
    LowRankCost,
    MergePlan,
    ModelProfile,
    Planner,
    SparseCost,
    Table,
    all_gather_like,
    choose_densities,
    fit_alpha_beta,
    largest_hidden_densities,
)

FloatArray = NDArray[np.float64]

# Backward on CPUs takes a core or more; waiting for an accelerator, or replayed, far less.
_BUSY = 0.7
_WIDE = torch.float32.itemsize  # of compressed values, whatever the gradients' dtype
_LIKELY_DENSITY = 0.1  # the most that a selection under `density="auto"` is timed at


def agree_on_profile(
    transport: Transport,
    carried: Mapping[str, Tensor],
    ready_seconds: dict[str, float],
    forward_seconds: float,
    model: str,
) -> ModelProfile:
    """Return the profile all ranks plan by: a gradient is ready when the slowest rank has it.

    Args:
        transport: joins the ranks.
        carried: what each parameter puts into its bucket, by name, in the order of registration.
        ready_seconds: this rank's times from the beginning of backward; parameters that never
            fired may be absent and come last.
        forward_seconds: this rank's time for one forward.
        model: its name, for the record.
    """
    everyone = transport.all_gather_object((ready_seconds, forward_seconds), key="profiles")
    slowest: dict[str, float] = {}
    for theirs, _ in everyone:
        for name, seconds in theirs.items():
            slowest[name] = max(slowest.get(name, 0.0), seconds)
    end = max(slowest.values(), default=0.0)
    unmeasured = unmeasured_profile(list(carried), list(carried.values()), set(carried))
    # sorted() is stable: ties, and what never fired, keep the reversed order of registration
    layers = sorted(unmeasured.layers, key=lambda layer: slowest.get(layer.name, end))
    ready = [slowest.get(layer.name, end) for layer in layers]
    backward = [now - before for now, before in zip(ready, [0.0, *ready[:-1]], strict=True)]
    return ModelProfile(
        model=model,
        layers=tuple(
            replace(layer, backward_seconds=b) for layer, b in zip(layers, backward, strict=True)
        ),
        forward_seconds=max(forward for _, forward in everyone),
        note=f"measured on {transport.world_size} ranks",
    )


def wire_dtype(tensors: Iterable[Tensor], method: ExchangeMethod | None) -> torch.dtype:
    """The dtype in which most bytes of an all-reduce will travel."""
    nbytes: dict[torch.dtype, int] = {}
    for tensor in tensors:
        dtype = real_dtype(tensor.dtype)
        nbytes[dtype] = nbytes.get(dtype, 0) + tensor.nbytes
    widest = max(nbytes, key=lambda d: nbytes[d])
    return method.wire_dtype(widest) if isinstance(method, Cast) else widest


def measure_link(
    transport: Transport,
    carried: Sequence[Tensor],
    method: ExchangeMethod | None,
    busy_fraction: float,
) -> LinkFit:
    """Time the transport in the wire dtype up to the largest possible group, and fit a line.

    Args:
        transport: joins the ranks.
        carried: what travels in buckets.
        method: decides the wire dtype.
        busy_fraction: how much of a core backward takes; messages are timed beside a computing
            thread where it takes most of one.
    """
    dtype = wire_dtype(carried, method)
    device = carried[0].device
    samples = time_all_reduce(
        transport,
        largest_nbytes=_count_reals(carried) * dtype.itemsize,
        dtype=dtype,
        device=device,
        beside_computation=_is_beside_computation(device, busy_fraction),
    )
    return fit_alpha_beta(samples)


def exchange_cost(
    transport: Transport,
    carried: Sequence[Tensor],
    method: ExchangeMethod | None,
    link: AlphaBeta,
    busy_fraction: float,
    *,
    is_given: bool,
) -> Cost:
    """What merge groups cost by `method`; times the compressor and its collective, if it has any.

    Args:
        transport: joins the ranks.
        carried, method, busy_fraction: as in `measure_link`.
        link: of an all-reduce.
        is_given: whether it is the user's, of a network that cannot be timed here.
    """
    match method:
        case Cast():
            return DenseCost(link, wire_dtype(carried, method).itemsize)
        case PowerSGD():
            return LowRankCost(link, method.wire_numel)
        case Compressor():
            sparse_link = link
            if method.collective == "all_gather":
                sparse_link = (
                    all_gather_like(link, transport.world_size)
                    if is_given
                    else _measure_all_gather(transport, carried, method, busy_fraction)
                )
            sparse = _compressed_cost(transport, carried, method, sparse_link)
            return CheaperCost(DenseCost(link), sparse)
        case _:
            return DenseCost(link)


def _measure_all_gather(
    transport: Transport, carried: Sequence[Tensor], method: Compressor, busy_fraction: float
) -> AlphaBeta:
    device = carried[0].device
    density = 1.0 if method.plan_chooses_density else method.settled_density
    samples = time_all_gather(
        transport,
        largest_nbytes=int(method.wire_nbytes(_count_reals(carried), _WIDE, density)),
        device=device,
        beside_computation=_is_beside_computation(device, busy_fraction),
    )
    return fit_alpha_beta(samples).link


def _compressed_cost(
    transport: Transport, carried: Sequence[Tensor], method: Compressor, link: AlphaBeta
) -> SparseCost:
    density = method.settled_density
    selection = time_compression(
        transport,
        method,
        largest_numel=_count_reals(carried),
        # where the plan may raise it, more is selected, and that takes longer
        density=max(density, _LIKELY_DENSITY) if method.plan_chooses_density else density,
        device=carried[0].device,
    )
    return SparseCost(link, Table(selection), WireNbytes(method, density), method.dense_below_numel)


@dataclass(frozen=True)
class WireNbytes:
    """A compressor's wire sizes at one density, as `SparseCost` asks for them."""

    compressor: Compressor
    density: float

    def __call__(self, numel: FloatArray, itemsize: FloatArray) -> FloatArray:
        return self.compressor.wire_nbytes(numel, itemsize, self.density)


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
        plan = planner.plan(profile, cost)
        if isinstance(cost, CheaperCost) and isinstance(method, Compressor):
            plan = _with_densities(profile, plan, cost, method)
    plan = transport.broadcast_object(plan, 0, key="plan")
    assert plan is not None
    return plan


def _with_densities(
    profile: ModelProfile, plan: MergePlan, cost: CheaperCost, method: Compressor
) -> MergePlan:
    if not method.plan_chooses_density:
        return choose_densities(profile, plan, cost)

    def cost_at(density: float) -> Cost:
        return replace(cost.sparse, wire_nbytes=WireNbytes(method, density))

    return largest_hidden_densities(profile, plan, cost_at, cost.dense, method.settled_density)


def after_backward(profile: ModelProfile) -> ModelProfile:
    """`profile` for an exchange that can start nothing before backward has ended."""
    seconds = [profile.backward_seconds, *[0.0] * (len(profile.layers) - 1)]
    layers = zip(profile.layers, seconds, strict=True)
    return replace(profile, layers=tuple(replace(p, backward_seconds=b) for p, b in layers))


def _count_reals(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * (2 if t.is_complex() else 1) for t in tensors)


def _is_beside_computation(device: torch.device, busy_fraction: float) -> bool:
    return device.type == "cpu" and busy_fraction > _BUSY
