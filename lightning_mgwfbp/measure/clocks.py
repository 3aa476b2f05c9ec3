"""The time at which something happens in training: on the host, or in a GPU's stream.

On a GPU an event is recorded on the stream, so that nothing waits for the device until seconds are
asked for.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

Instant = float | torch.cuda.Event

now = time.perf_counter


def clock_of(tensor: Tensor | None) -> Callable[[], Instant]:
    """What tells the time where `tensor` is computed with."""
    return device_now if tensor is not None and tensor.is_cuda else now


def device_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Instant, end: Instant) -> float:
    """Seconds between two times of one clock; waits for a GPU that is not there yet."""
    if isinstance(begin, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3
    assert not isinstance(end, torch.cuda.Event)
    return end - begin
