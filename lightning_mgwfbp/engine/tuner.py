"""From what each rank measured to one plan for all: measure, fit, plan on rank 0, broadcast.

Ranks measure different times. Were each to plan by its own, their plans could differ, and ranks
with different plans wait for each other for ever; so the *plan* is what travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_mgwfbp.engine.layout import unmeasured_profile
from lightning_mgwfbp.exchange.buckets import real_dtype
from lightning_mgwfbp.exchange.compressors import Cast, Compressor
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.measure.collectives import time_all_reduce
from lightning_mgwfbp.plan import (
    AlphaBeta,
    DenseCost,
    LinkFit,
    MergePlan,
    ModelProfile,
    Planner,
    fit_alpha_beta,
)

# Backward on CPUs takes a core or more; waiting for an accelerator, or replayed, far less.
_BUSY = 0.7


def agree_on_profile(
    transport: Transport,
    parameters: dict[str, nn.Parameter],
    ready_seconds: dict[str, float],
    forward_seconds: float,
    model: str,
) -> ModelProfile:
    """Return the profile all ranks plan by: a gradient is ready when the slowest rank has it.

    Args:
        transport: joins the ranks.
        parameters: those to be planned, by name, in the order of registration.
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
    unmeasured = unmeasured_profile(list(parameters), list(parameters.values()), set(parameters))
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


def wire_dtype(parameters: Sequence[nn.Parameter], compressor: Compressor | None) -> torch.dtype:
    """The dtype in which most bytes will travel."""
    nbytes: dict[torch.dtype, int] = {}
    for p in parameters:
        dtype = real_dtype(p.dtype)
        nbytes[dtype] = nbytes.get(dtype, 0) + p.nbytes
    widest = max(nbytes, key=lambda d: nbytes[d])
    if isinstance(compressor, Cast) and compressor.wire_dtype.itemsize < widest.itemsize:
        return compressor.wire_dtype
    return widest


def measure_link(
    transport: Transport,
    parameters: Sequence[nn.Parameter],
    compressor: Compressor | None,
    busy_fraction: float,
) -> LinkFit:
    """Time the transport in the wire dtype up to the largest possible group, and fit a line.

    Args:
        transport: joins the ranks.
        parameters: those that will be exchanged.
        compressor: decides the wire dtype.
        busy_fraction: how much of a core backward takes; messages are timed beside a computing
            thread where it takes most of one.
    """
    dtype = wire_dtype(parameters, compressor)
    device = parameters[0].device
    numel = sum(p.numel() * (2 if p.is_complex() else 1) for p in parameters)
    samples = time_all_reduce(
        transport,
        largest_nbytes=numel * dtype.itemsize,
        dtype=dtype,
        device=device,
        beside_computation=device.type == "cpu" and busy_fraction > _BUSY,
    )
    return fit_alpha_beta(samples)


def dense_cost(link: AlphaBeta, compressor: Compressor | None) -> DenseCost:
    """What a merge group costs on `link` in the wire format."""
    narrow = compressor.wire_dtype.itemsize if isinstance(compressor, Cast) else None
    return DenseCost(link, narrow)


def agree_on_plan(
    transport: Transport, profile: ModelProfile, planner: Planner, cost: DenseCost
) -> MergePlan:
    """Plan on rank 0 and give every rank its plan."""
    plan = planner.plan(profile, cost) if transport.rank == 0 else None
    plan = transport.broadcast_object(plan, 0, key="plan")
    assert plan is not None
    return plan
