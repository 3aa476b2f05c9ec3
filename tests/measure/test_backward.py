"""A failure here is a gradient's time that is not its own."""

import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn

from lightning_mgwfbp.measure import clocks
from lightning_mgwfbp.measure.backward import BackwardProfiler


class Chain(nn.Module):
    """x * a * b * c, whose gradients are ready in the order c, b, a."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.tensor(v)) for v in (2.0, 3.0, 5.0))

    def forward(self) -> torch.Tensor:
        return 7 * self.a * self.b * self.c


def on_clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """The profiler's clock reads `times`, one after the other."""
    left: Iterator[float] = iter(times)
    monkeypatch.setattr(clocks, "now", lambda: next(left))


def attached(chain: nn.Module) -> BackwardProfiler:
    """A profiler that is told of each gradient, as the reducer tells it."""
    profiler = BackwardProfiler(next(chain.parameters()))
    for name, p in chain.named_parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(partial(_mark, profiler, name))
    return profiler


def _mark(profiler: BackwardProfiler, name: str, _: torch.Tensor) -> None:
    profiler.mark(name)


def test_medians_in_order_of_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong statistic, a start that is not backward's, or names of other parameters."""
    on_clock(monkeypatch, 0, 1, 2, 4, 10, 12, 13, 14, 20, 23, 29, 30)
    chain = Chain()
    profiler = attached(chain)
    for _ in range(3):
        profiler.begin()
        chain().backward()
        profiler.end()
    assert list(profiler.ready_seconds().items()) == [("c", 2), ("b", 3), ("a", 4)]


def test_busy_fraction_tells_computing_from_waiting() -> None:
    """Links are timed beside a computing thread where nothing computes, or not where it does."""

    def fraction(pass_time: Callable[[], None]) -> float:
        profiler = attached(chain := Chain())
        loss = chain()
        loss.register_hook(lambda _: pass_time())
        profiler.begin()
        loss.backward()
        return profiler.busy_fraction()

    def compute() -> None:
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass

    assert fraction(lambda: time.sleep(0.05)) < fraction(compute)


def test_real_times_are_in_the_order_of_backward() -> None:
    """The same on the real clock: hooks fire in another order than they are told."""
    chain = Chain()
    profiler = attached(chain)
    for _ in range(3):
        profiler.begin()
        chain().backward()
        profiler.end()
    ready = profiler.ready_seconds()
    assert list(ready) == ["c", "b", "a"]
    assert 0 < ready["c"] < ready["b"] < ready["a"]


def test_without_begin_the_first_gradient_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-alone wrapper, which does not see backward begin, has no times at all."""
    on_clock(monkeypatch, 100, 101, 103, 200, 201, 203)
    chain = Chain()
    profiler = attached(chain)
    for _ in range(2):
        chain().backward()
        profiler.end()
    assert profiler.ready_seconds() == {"c": 0, "b": 1, "a": 3}


def test_of_several_firings_the_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared parameter is taken to be ready before its last gradient is."""
    on_clock(monkeypatch, 0, 1, 2, 3, 4, 5, 6)
    chain = Chain()
    profiler = attached(chain)
    profiler.begin()
    loss = chain()
    loss.backward(retain_graph=True)
    loss.backward()
    assert profiler.ready_seconds() == {"c": 4, "b": 5, "a": 6}


def test_forget_drops_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold first step is counted."""
    on_clock(monkeypatch, 0, 90, 91, 92, 100, 101, 102, 103)
    chain = Chain()
    profiler = attached(chain)
    profiler.begin()
    chain().backward()
    profiler.end()
    profiler.forget()
    profiler.begin()
    chain().backward()
    assert profiler.ready_seconds() == {"c": 1, "b": 2, "a": 3}


def test_frozen_and_unused_parameters_are_absent() -> None:
    """Zero seconds are made up for what was never ready."""
    chain = Chain()
    chain.b.requires_grad_(False)
    profiler = attached(chain)
    (chain.a * chain.b).backward()
    assert list(profiler.ready_seconds()) == ["a"]
    assert attached(chain).ready_seconds() == {}
