"""When does each gradient become ready? Timed in real training steps, by one of the `clocks`."""

from __future__ import annotations

import statistics
import time

from torch import Tensor

from lightning_mgwfbp.measure.clocks import Instant, clock_of, seconds_between


class BackwardProfiler:
    """Records, for every backward, when each gradient was ready.

    A parameter whose gradient becomes ready several times in one backward counts with its last
    time.

    Args:
        sample: a parameter, on whose device backward computes.
    """

    def __init__(self, sample: Tensor) -> None:
        self._now = clock_of(sample)
        self._backwards: list[_Backward] = []

    def begin(self) -> None:
        """Say that a backward begins now. Without it a backward begins with its first gradient."""
        self._backwards.append(_Backward(self._now()))

    def end(self) -> None:
        """Say that a step is over: the next gradient belongs to another backward."""
        self._backwards.append(_Backward(None))

    def forget(self) -> None:
        """Drop what was recorded (the first step, in which memory and caches are still cold)."""
        self._backwards.clear()

    def ready_seconds(self) -> dict[str, float]:
        """Return the median time from the beginning of backward to each gradient, by name.

        In the order of readiness; parameters that never fired are absent.
        """
        times: dict[str, list[float]] = {}
        for backward in self._backwards:
            for name, seconds in backward.seconds().items():
                times.setdefault(name, []).append(seconds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        return dict(sorted(medians.items(), key=lambda item: item[1]))

    def busy_fraction(self) -> float:
        """CPU time of this process per wall time, over all backwards: 1 where one core computes,
        little where an accelerator does."""
        wall = sum(b.wall_end - b.wall_begin for b in self._backwards)
        cpu = sum(b.cpu_end - b.cpu_begin for b in self._backwards)
        return cpu / wall if wall else 0.0

    def mark(self, name: str) -> None:
        """Say that the gradient of this parameter is ready now."""
        if not self._backwards:
            self.end()
        self._backwards[-1].mark(name, self._now())


class _Backward:
    def __init__(self, start: Instant | None) -> None:
        self.start = start
        self.marks: dict[str, Instant] = {}
        self.wall_begin = self.wall_end = time.perf_counter()
        self.cpu_begin = self.cpu_end = time.process_time()

    def mark(self, name: str, now: Instant) -> None:
        if self.start is None and not self.marks:  # begins here
            self.wall_begin, self.cpu_begin = time.perf_counter(), time.process_time()
        self.marks[name] = now
        self.wall_end, self.cpu_end = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        if not self.marks:
            return {}
        start = self.start if self.start is not None else next(iter(self.marks.values()))
        return {name: seconds_between(start, mark) for name, mark in self.marks.items()}
