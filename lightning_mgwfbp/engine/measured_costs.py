"""What exchanges cost, timed on the transport that will carry them: one `Cost` for planners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import real_dtype
from lightning_mgwfbp.exchange.compressors import Cast, Compressor
from lightning_mgwfbp.exchange.methods import ExchangeMethod
from lightning_mgwfbp.exchange.power_sgd import PowerSGD
from lightning_mgwfbp.exchange.transport import Halves, Transport
from lightning_mgwfbp.measure.collectives import (
    time_all_gather,
    time_all_reduce,
    time_half,
)
from lightning_mgwfbp.measure.compression import time_compression
from lightning_mgwfbp.plan import (
    AlphaBeta,
    CheaperCost,
    Cost,
    DenseCost,
    HalvesCost,
    LinkFit,
    LowRankCost,
    SparseCost,
    Table,
    all_gather_like,
    fit_alpha_beta,
)

FloatArray = NDArray[np.float64]

# Backward on CPUs takes a core or more; waiting for an accelerator, or replayed, far less.
_BUSY = 0.7
_WIDE = torch.float32.itemsize  # of compressed values, whatever the gradients' dtype
_LIKELY_DENSITY = 0.1  # the most that a selection under `density="auto"` is timed at


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


def halves_cost(
    transport: Transport,
    halves: Halves,
    carried: Sequence[Tensor],
    method: ExchangeMethod | None,
    link: AlphaBeta | None,
    busy_fraction: float,
) -> tuple[AlphaBeta, HalvesCost]:
    """The link that both halves in a row come closest to, and what they cost, by a Cast or None.

    Args:
        transport: joins the ranks.
        halves: over the same ranks.
        carried, method, busy_fraction: as in `measure_link`.
        link: the user's, of a network that cannot be timed here; None: the halves are timed.
    """
    dtype = wire_dtype(carried, method)
    itemsize = None if method is None else dtype.itemsize
    if link is not None:
        return link, HalvesCost.of_all_reduce(link, itemsize)
    nbytes, device = _count_reals(carried) * dtype.itemsize, carried[0].device
    beside = _is_beside_computation(device, busy_fraction)
    scatter, gather = (
        time_half(
            transport,
            half,
            largest_nbytes=nbytes,
            dtype=dtype,
            device=device,
            beside_computation=beside,
        )
        for half in (halves.reduce_scatter, halves.all_gather)
    )
    # of the same sizes, up to where one took too long
    both = [(nbytes, s + g) for (nbytes, s), (_, g) in zip(scatter, gather, strict=False)]
    cost = HalvesCost(Table(scatter), Table(gather), itemsize)
    return fit_alpha_beta(both).link, cost


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


def _count_reals(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * (2 if t.is_complex() else 1) for t in tensors)


def _is_beside_computation(device: torch.device, busy_fraction: float) -> bool:
    return device.type == "cpu" and busy_fraction > _BUSY
