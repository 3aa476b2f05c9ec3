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
    choose_densities,
    fit_alpha_beta,
    largest_hidden_densities,
)

FloatArray = NDArray[np.float64]

# Backward on CPUs takes a core or more; waiting for an accelerator, or replayed, far less.
_BUSY = 0.7


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
) -> Cost:
    """What merge groups cost by `method`; times the compressor and its collective, if it has any.

    Args:
        transport: joins the ranks; on a `link` whose all-reduces were measured before.
        carried, method, busy_fraction: as in `measure_link`.
    """
    match method:
        case Cast():
            return DenseCost(link, wire_dtype(carried, method).itemsize)
        case PowerSGD():
            return LowRankCost(link, method.wire_numel)
        case Compressor():
            sparse = _compressed_cost(transport, carried, method, link, busy_fraction)
            return CheaperCost(DenseCost(link), sparse)
        case _:
            return DenseCost(link)


def _compressed_cost(
    transport: Transport,
    carried: Sequence[Tensor],
    method: Compressor,
    link: AlphaBeta,
    busy_fraction: float,
) -> SparseCost:
    device = carried[0].device
    density = method.settled_density
    numel = _count_reals(carried)
    selection = time_compression(
        transport, method, largest_numel=numel, density=density, device=device
    )
    if method.collective == "all_gather":
        samples = time_all_gather(
            transport,
            largest_nbytes=int(method.wire_nbytes(numel, 4, density)),
            device=device,
            beside_computation=_is_beside_computation(device, busy_fraction),
        )
        link = fit_alpha_beta(samples).link
    return SparseCost(link, Table(selection), WireNbytes(method, density), method.dense_below_numel)


@dataclass(frozen=True)
class WireNbytes:
    """A compressor's wire sizes at one density, as `SparseCost` asks for them."""

    compressor: Compressor
    density: float

    def __call__(self, numel: FloatArray, itemsize: FloatArray) -> FloatArray:
        return self.compressor.wire_nbytes(numel, itemsize, self.density)


def agree_on_plan(
    transport: Transport, profile: ModelProfile, planner: Planner, cost: Cost
) -> MergePlan:
    """Plan on rank 0 and give every rank its plan, with the form in which each group travels."""
    plan = _plan(profile, planner, cost) if transport.rank == 0 else None
    plan = transport.broadcast_object(plan, 0, key="plan")
    assert plan is not None
    return plan


def _plan(profile: ModelProfile, planner: Planner, cost: Cost) -> MergePlan:
    plan = planner.plan(profile, cost)
    if not isinstance(cost, CheaperCost):
        return plan
    wire = cost.sparse.wire_nbytes
    assert isinstance(wire, WireNbytes)
    if not wire.compressor.plan_chooses_density:
        return choose_densities(profile, plan, cost)

    def cost_at(density: float) -> Cost:
        return replace(cost.sparse, wire_nbytes=WireNbytes(wire.compressor, density))

    return largest_hidden_densities(profile, plan, cost_at, cost.dense, wire.density)


def after_backward(profile: ModelProfile) -> ModelProfile:
    """`profile` for an exchange that can start nothing before backward has ended."""
    seconds = [profile.backward_seconds, *[0.0] * (len(profile.layers) - 1)]
    layers = zip(profile.layers, seconds, strict=True)
    return replace(profile, layers=tuple(replace(p, backward_seconds=b) for p, b in layers))


def _count_reals(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * (2 if t.is_complex() else 1) for t in tensors)


def _is_beside_computation(device: torch.device, busy_fraction: float) -> bool:
    return device.type == "cpu" and busy_fraction > _BUSY
