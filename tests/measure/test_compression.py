"""A failure here is a compressor whose time is not what training will spend before it can send."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from loopback import on_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import Compressor, Moment, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.compressors.base import Wire
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.measure import compression
from lightning_mgwfbp.measure.compression import time_compression

Samples = list[tuple[float, float]]


class Clock(threading.local):
    """Each rank's own; it runs only when told to."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(compression, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


def slow(clock: Clock, rank: int = 0, calls: list[tuple[int, float]] | None = None) -> Compressor:
    """Takes 2 s for each element to encode and 1 s to leave the rest, on rank 1 twice as long; a
    hundred times as long for the first one of a size."""
    seen: set[int] = set()

    class Slow(TopK):
        def encode(self, buffer: Tensor, moment: Moment) -> Wire:
            cold = 1 if buffer.numel() in seen else 100
            seen.add(buffer.numel())
            clock.now += 2.0 * buffer.numel() * (1 + rank) * cold
            if calls is not None:
                calls.append((buffer.numel(), moment.density))
            return super().encode(buffer, moment)

        def leave_residual(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
            clock.now += 1.0 * buffer.numel() * (1 + rank)
            super().leave_residual(buffer, wire, moment)

    return Slow(0.5)


@pytest.mark.parametrize(
    ("largest", "sizes"),
    [
        (0, [1024, 2048]),
        (2048, [1024, 2048]),
        (10_000, [1024, 4096, 10_000]),
        (2**14, [1024, 4096, 2**14]),
    ],
)
def test_seconds_and_sizes(clock: Clock, largest: int, sizes: list[int]) -> None:
    """Only a part of what is done is timed, the first, cold one counts, or too few sizes."""
    calls: list[tuple[int, float]] = []
    samples = time_compression(
        LoopbackTransport.solo(), slow(clock, calls=calls), largest_numel=largest, density=0.25
    )
    assert samples == [(n, 3.0 * n) for n in sizes]
    assert {density for _, density in calls} == {0.25}
    assert {numel for numel, _ in calls} == set(sizes)


def test_all_ranks_hear_of_the_slowest(clock: Clock) -> None:
    """Ranks plan by different tables."""

    def measure(transport: LoopbackTransport) -> Samples:
        return time_compression(
            transport, slow(clock, transport.rank), largest_numel=3000, density=0.1
        )

    assert on_ranks(measure) == [[(1024, 6.0 * 1024), (3000, 6.0 * 3000)]] * 2


@pytest.mark.parametrize("compressor", [TopK(0.01), RandomK(0.01), Quantize8()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_real_ones(compressor: Compressor, dtype: torch.dtype) -> None:
    """A compressor cannot be timed, or what it is given is not what training has."""
    samples = time_compression(
        LoopbackTransport.solo(), compressor, largest_numel=5000, density=0.01, dtype=dtype
    )
    assert [n for n, _ in samples] == [1024, 4096, 5000]
    assert all(seconds > 0 for _, seconds in samples)
