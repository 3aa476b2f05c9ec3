"""How long does a message of each size take? Timed on the real transport, all ranks together.

Messages are issued as the engine issues them: several in flight, then all waited for; one after
another they would over-charge the start-up (gloo: eight 256 KiB all-reduces at 1 Gbit/s take 43 ms
one by one, 20 ms in flight). The slowest rank counts.
"""

from __future__ import annotations

import statistics
import time

import torch

from lightning_mgwfbp.exchange.transport import Transport

_SMALLEST_NBYTES = 8
_MOST_IN_FLIGHT = 4
_REPEATS = 5


def time_all_reduce(
    transport: Transport,
    *,
    largest_nbytes: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    budget_seconds: float = 2.0,
) -> list[tuple[float, float]]:
    """Time all-reduces from a few bytes to `largest_nbytes`, in steps of four.

    Args:
        transport: every rank must call this at the same time.
        largest_nbytes: the largest message that will be sent.
        dtype: the wire dtype.
        device: where the buffers lie.
        budget_seconds: sizes are given up, largest first, once this much time has been spent; on
            a link so slow a straight line through the smaller ones is as good.

    Returns:
        (nbytes, seconds) pairs by size, at least two, the same on all ranks.
    """
    largest = max(largest_nbytes // dtype.itemsize, 64)
    buffer = torch.zeros(largest, dtype=dtype, device=device)
    sizes = [max(_SMALLEST_NBYTES // dtype.itemsize, 1)]
    while sizes[-1] * 4 < largest:
        sizes.append(sizes[-1] * 4)
    sizes.append(largest)
    _time_once(transport, buffer, sizes[0])  # the first collective opens connections
    samples: list[tuple[float, float]] = []
    spent = 0.0
    for numel in sizes:
        times: list[float] = []
        for _ in range(_REPEATS):
            took = max(
                transport.all_gather_object(_time_once(transport, buffer, numel), key="slowest")
            )
            times.append(took / _in_flight(buffer, numel))
            spent += took
            if len(samples) >= 2 and spent > budget_seconds:
                break
        samples.append((float(numel * dtype.itemsize), statistics.median(times)))
        # the next size takes at least as long, and about four times on a slow link
        if len(samples) >= 2 and spent + took > budget_seconds:
            break
    return samples


def _in_flight(buffer: torch.Tensor, numel: int) -> int:
    return max(1, min(_MOST_IN_FLIGHT, buffer.numel() // numel))


def _time_once(transport: Transport, buffer: torch.Tensor, numel: int) -> float:
    """Seconds for as many messages of `numel` as are in flight together."""
    messages = buffer[: numel * _in_flight(buffer, numel)].split(numel)
    transport.all_reduce(buffer[:1], key="start together").wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    begin = time.perf_counter()
    pending = [transport.all_reduce(m, key=f"time {numel} {i}") for i, m in enumerate(messages)]
    for p in pending:
        p.wait()
    if buffer.is_cuda:
        torch.cuda.synchronize(buffer.device)
    return time.perf_counter() - begin
