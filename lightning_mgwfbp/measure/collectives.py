"""How long does a message of each size take? Timed on the real transport, all ranks together.

Messages are issued as the engine issues them: several in flight, then all waited for; one after
another they would over-charge the start-up (gloo: eight 256 KiB all-reduces at 1 Gbit/s take 43 ms
one by one, 20 ms in flight). Where training computes on the cores that serve the network, they are
timed beside a computing thread: a transport that must wait for a core to become free has another
start-up than on an idle machine. The slowest rank counts.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.transport import Half, Pending, Transport

Start = Callable[[Tensor, str], Pending]  # a message and its key


_SMALLEST_NBYTES = 8
_MOST_IN_FLIGHT = 4
# Those of one bucket are launched together, and all-gathers follow each other closely.
_MOST_PIECES_IN_FLIGHT = 16
_GROWTH = 4  # from one size to the next
_QUICK_SECONDS = 0.01  # what is so short is repeated more often: it is noisier, too
_MOST_REPEATS = 15
_FEWEST_REPEATS = 3


def time_all_reduce(
    transport: Transport,
    *,
    largest_nbytes: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    budget_seconds: float = 3.0,
    beside_computation: bool = False,
) -> list[tuple[float, float]]:
    """Time all-reduces from a few bytes to `largest_nbytes`, each size four times the last.

    Args:
        transport: every rank must call this at the same time.
        largest_nbytes: the largest message that will be sent.
        dtype: the wire dtype.
        device: where the buffers lie.
        budget_seconds: a size that would exceed it is given up, and all larger ones; on a link
            so slow a straight line through the smaller ones is as good. A few bytes and four
            times as many are always timed.
        beside_computation: keep one core of each rank computing meanwhile.

    Returns:
        (nbytes, seconds) pairs by size, at least two, the same on all ranks.
    """
    return _time_sizes(
        transport,
        partial(_all_reduce, transport),
        largest_nbytes,
        dtype,
        device,
        budget_seconds,
        beside_computation,
    )


def time_all_gather(
    transport: Transport,
    *,
    largest_nbytes: int,
    device: torch.device | str = "cpu",
    budget_seconds: float = 3.0,
    beside_computation: bool = False,
) -> list[tuple[float, float]]:
    """Time all-gathers of bytes, by what each rank sends; otherwise as `time_all_reduce`."""
    return _time_sizes(
        transport,
        partial(_all_gather, transport),
        largest_nbytes,
        torch.uint8,
        device,
        budget_seconds,
        beside_computation,
    )


def time_half(
    transport: Transport,
    half: Half,
    *,
    largest_nbytes: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    budget_seconds: float = 3.0,
    beside_computation: bool = False,
) -> list[tuple[float, float]]:
    """Time pieces of one of two halves, by the bytes of all rows; otherwise as `time_all_reduce`.

    Args:
        half: `Halves.reduce_scatter` or `Halves.all_gather`, over the same ranks.
    """
    return _time_sizes(
        transport,
        lambda message, key: half(message.view(transport.world_size, -1), key=key),
        largest_nbytes,
        dtype,
        device,
        budget_seconds,
        beside_computation,
        rows=transport.world_size,
        most_in_flight=_MOST_PIECES_IN_FLIGHT,
    )


def _all_reduce(transport: Transport, message: Tensor, key: str) -> Pending:
    return transport.all_reduce(message, key=key)


def _all_gather(transport: Transport, message: Tensor, key: str) -> Pending:
    output = message.new_empty((transport.world_size, message.numel()))
    return transport.all_gather(output, message, key=key)


def _time_sizes(
    transport: Transport,
    start: Start,
    largest_nbytes: int,
    dtype: torch.dtype,
    device: torch.device | str,
    budget_seconds: float,
    beside_computation: bool,
    rows: int = 1,
    most_in_flight: int = _MOST_IN_FLIGHT,
) -> list[tuple[float, float]]:
    """Time messages of `rows` rows each, of 8 bytes and more."""
    _return_free_memory()
    largest = max(largest_nbytes // (rows * dtype.itemsize), 64)
    messages = _Messages(torch.zeros(rows * largest, dtype=dtype, device=device), most_in_flight)
    sizes = [max(_SMALLEST_NBYTES // dtype.itemsize, 1)]
    while sizes[-1] * _GROWTH < largest:
        sizes.append(sizes[-1] * _GROWTH)
    sizes.append(largest)
    sizes = [rows * numel for numel in sizes]
    with _computation() if beside_computation else nullcontext():
        return _time_each(transport, start, messages, sizes, budget_seconds)


@dataclass(frozen=True)
class _Messages:
    """Parts of a buffer that are in flight together."""

    buffer: Tensor
    most: int

    def count(self, numel: int) -> int:
        return max(1, min(self.most, self.buffer.numel() // numel))

    def of(self, numel: int) -> tuple[Tensor, ...]:
        return self.buffer[: numel * self.count(numel)].split(numel)


def _time_each(
    transport: Transport,
    start: Start,
    messages: _Messages,
    sizes: Sequence[int],
    budget_seconds: float,
) -> list[tuple[float, float]]:
    _time_once(transport, start, messages.of(sizes[0]))  # the first collective opens connections
    samples: list[tuple[float, float]] = []
    spent, last = 0.0, 0.0
    for numel in sizes:
        # all from what all ranks know, so that all decide alike
        if len(samples) >= 2 and spent + last * _GROWTH * _FEWEST_REPEATS > budget_seconds:
            break
        repeats = _MOST_REPEATS if last < _QUICK_SECONDS else _FEWEST_REPEATS
        mine = [_time_once(transport, start, messages.of(numel)) for _ in range(repeats)]
        everyone = transport.all_gather_object(mine, key="slowest")
        slowest = [max(times) for times in zip(*everyone, strict=True)]
        last = statistics.median(slowest)
        spent += sum(slowest)
        nbytes = float(numel * messages.buffer.itemsize)
        samples.append((nbytes, last / messages.count(numel)))
    return samples


@contextmanager
def _computation() -> Iterator[None]:
    """Keep one thread multiplying matrices, as backward does."""
    done = threading.Event()

    def compute() -> None:
        matrix = torch.ones(64, 64)  # too small for a product to be spread over threads
        while not done.is_set():
            torch.mm(matrix, matrix)

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _return_free_memory() -> None:
    """Have the C library give back what backward has freed: the buffer would come on top of it,
    and this be the peak of the whole training's memory."""
    with suppress(AttributeError, OSError):  # only glibc has the function
        ctypes.CDLL(None).malloc_trim(0)


def _time_once(transport: Transport, start: Start, messages: Sequence[Tensor]) -> float:
    """Seconds for all of `messages`, in flight together."""
    first = messages[0]
    transport.all_reduce(first[:1], key="start together").wait()
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    begin = time.perf_counter()
    pending = [start(m, f"time {m.numel()} {i}") for i, m in enumerate(messages)]
    for p in pending:
        p.wait()
    if first.is_cuda:
        torch.cuda.synchronize(first.device)
    return time.perf_counter() - begin
