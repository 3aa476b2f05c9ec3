"""How long does it take to compress so many elements? Timed on this machine, the slowest counts."""

from __future__ import annotations

import statistics
import time

import torch

from lightning_mgwfbp.exchange.compressors.base import Compressor, Moment
from lightning_mgwfbp.exchange.transport import Transport

_SMALLEST_NUMEL = 1024
_GROWTH = 4  # from one size to the next
_REPEATS = 5


def time_compression(
    transport: Transport,
    compressor: Compressor,
    *,
    largest_numel: int,
    density: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> list[tuple[float, float]]:
    """Time what an exchange does on the compute stream before a message can be sent: add gradient
    and rest, encode, leave the new rest.

    Args:
        transport: every rank must call this at the same time.
        compressor: the one that training uses.
        largest_numel: the largest group.
        density: the fraction that will travel.
        dtype: in which gradients are accumulated.
        device: where they lie.

    Returns:
        (numel, seconds) pairs by size, at least two, the same on all ranks.
    """
    generator = torch.Generator(device=device).manual_seed(0)
    largest = max(largest_numel, 2 * _SMALLEST_NUMEL)
    gradient = torch.randn(largest, dtype=dtype, device=device, generator=generator)
    buffer = torch.empty_like(gradient)
    sizes = [_SMALLEST_NUMEL]
    while sizes[-1] * _GROWTH < largest:
        sizes.append(sizes[-1] * _GROWTH)
    sizes.append(largest)
    moment = Moment(step=0, density=density)
    samples = []
    for numel in sizes:
        mine = [
            _time_once(compressor, gradient[:numel], buffer[:numel], moment)
            for _ in range(_REPEATS)
        ]
        # the first one is cold
        everyone = transport.all_gather_object(statistics.median(mine[1:]), key="slowest")
        samples.append((float(numel), max(everyone)))
    return samples


def _time_once(
    compressor: Compressor, gradient: torch.Tensor, buffer: torch.Tensor, moment: Moment
) -> float:
    _wait_for(gradient)
    begin = time.perf_counter()
    torch.add(gradient, gradient, out=buffer)
    wire = compressor.encode(buffer, moment)
    compressor.leave_residual(buffer, wire, moment)
    _wait_for(gradient)
    return time.perf_counter() - begin


def _wait_for(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
