"""A failure here is a link that is timed otherwise than it will be used."""

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from loopback import on_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending, Transport
from lightning_mgwfbp.measure import collectives
from lightning_mgwfbp.measure.collectives import (
    time_all_gather,
    time_all_reduce,
    time_half,
)

Samples = list[tuple[float, float]]


class Link(LoopbackTransport):
    """One rank on a link of `alpha` seconds and `beta` seconds per byte, on a clock of its own."""

    def __init__(self, alpha: float, beta: float) -> None:
        solo = LoopbackTransport.solo()
        super().__init__(solo._hub, 0)
        self.alpha, self.beta = alpha, beta
        self.now = 0.0
        self.in_flight = 0
        self.most_in_flight = 0
        self.messages: list[Tensor] = []
        self.gathered: list[Tensor] = []
        self.scattered: list[Tensor] = []

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        self.messages.append(buffer)
        self.now += self.alpha + self.beta * buffer.nbytes
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return SimpleNamespace(wait=self._wait)

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        assert output.shape == (self.world_size, buffer.numel())
        pending = self.all_reduce(buffer, key=key)
        self.gathered.append(buffer)
        return pending

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        assert len(rows) == self.world_size
        pending = self.all_reduce(rows, key=key)
        self.scattered.append(rows)
        return pending

    def _wait(self) -> None:
        self.in_flight -= 1


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link(alpha=2e-3, beta=1e-6)
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: link.now))
    return link


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("largest", [1, 8, 1000, 100_000])
def test_seconds_and_sizes(link: Link, dtype: torch.dtype, largest: int) -> None:
    """Times are not per message, sizes are not bytes, or the dtype is not that of the wire."""
    samples = time_all_reduce(link, largest_nbytes=largest, dtype=dtype, budget_seconds=1e9)
    sizes = [size for size, _ in samples]
    assert len(sizes) >= 2
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 8
    assert sizes[-1] == max(largest // dtype.itemsize, 64) * dtype.itemsize
    assert all(b <= 4 * a for a, b in pairwise(sizes))
    assert {m.dtype for m in link.messages} == {dtype}
    assert [t for _, t in samples] == pytest.approx([2e-3 + 1e-6 * size for size in sizes])


def test_several_are_in_flight_together(link: Link) -> None:
    """One after another, the start-up costs of gloo are over-charged; none may be left waiting."""
    time_all_reduce(link, largest_nbytes=4000)
    assert link.most_in_flight == 4
    assert link.in_flight == 0


@pytest.mark.parametrize("budget", [0.1, 1.0, 10.0])
def test_the_budget_bounds_the_time(link: Link, budget: float) -> None:
    """Training starts minutes late on a slow link; without a bound this one takes over a minute."""
    samples = time_all_reduce(link, largest_nbytes=2**24, budget_seconds=budget)
    # a second for the two sizes that are always timed, and for repeats of what is quick
    assert link.now <= 1.2 * budget + 1.0
    begin = link.now
    generous = time_all_reduce(link, largest_nbytes=2**24, budget_seconds=1e9)
    assert link.now - begin > 60
    assert 2 <= len(samples) < len(generous)
    for (size, seconds), (same_size, same_seconds) in zip(samples, generous, strict=False):
        assert (size, seconds) == (same_size, pytest.approx(same_seconds))


def test_all_ranks_hear_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks fit different links, and fail to agree on when to stop."""
    clock = threading.local()  # each rank's own, and it runs only while a message is sent
    monkeypatch.setattr(collectives, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def measure(transport: LoopbackTransport) -> Samples:
        clock.now = 0.0
        start = transport.all_reduce

        def timed(buffer: Tensor, *, key: str) -> Pending:
            clock.now += (3.0, 1.0)[transport.rank]
            return start(buffer, key=key)

        transport.all_reduce = timed  # type: ignore[method-assign]
        return time_all_reduce(transport, largest_nbytes=300, budget_seconds=1e9)

    for samples in on_ranks(measure):
        assert samples == [(8, 3.0), (32, 3.0), (128, 3.0), (300, 3.0)]


@pytest.mark.parametrize("largest", [1, 8, 1000, 100_000])
def test_all_gathers_are_timed_by_what_a_rank_sends(link: Link, largest: int) -> None:
    """Another collective is timed, or sizes are those of what all ranks send."""
    link.world_size = 4
    samples = time_all_gather(link, largest_nbytes=largest, budget_seconds=1e9)
    sizes = [size for size, _ in samples]
    assert sizes[0] == 8
    assert sizes[-1] == max(largest, 64)
    assert {m.numel() for m in link.gathered} == set(sizes)
    assert {m.dtype for m in link.messages} == {torch.uint8}
    assert link.most_in_flight == min(4, max(largest, 64) // 8)
    assert [t for _, t in samples] == pytest.approx([2e-3 + 1e-6 * size for size in sizes])


def test_all_gathers_on_ranks_that_meet() -> None:
    """Ranks time different messages, or fit different links."""
    ours, theirs = on_ranks(lambda t: time_all_gather(t, largest_nbytes=1000))
    assert ours == theirs
    assert [size for size, _ in ours] == [8, 32, 128, 512, 1000]
    assert all(seconds > 0 for _, seconds in ours)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [1, 1000, 100_000])
def test_halves_are_timed_by_what_all_rows_hold(
    link: Link, largest: int, dtype: torch.dtype
) -> None:
    """Another collective is timed, rows are unequal, or sizes are those of one row."""
    link.world_size = 3
    samples = time_half(
        link, link.reduce_scatter, largest_nbytes=largest, dtype=dtype, budget_seconds=1e9
    )
    sizes = [size for size, _ in samples]
    assert sizes[0] == 3 * 8
    assert sizes[-1] == max(largest // (3 * dtype.itemsize), 64) * 3 * dtype.itemsize
    assert {m.nbytes for m in link.scattered} == set(sizes)
    assert {m.dtype for m in link.scattered} == {dtype}
    assert link.most_in_flight == 16
    assert [t for _, t in samples] == pytest.approx([2e-3 + 1e-6 * size for size in sizes])


def reduce_scatters(transport: Transport) -> Samples:
    halves = transport.halves(torch.device("cpu"))
    return time_half(transport, halves.reduce_scatter, largest_nbytes=1000)


def test_halves_on_ranks_that_meet() -> None:
    """Ranks time different messages, or fit different links."""
    ours, theirs = on_ranks(reduce_scatters)
    assert ours == theirs
    assert [size for size, _ in ours] == [16, 64, 256, 1000]
