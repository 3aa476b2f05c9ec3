"""`ExposedTime`: how long training waits for exchanges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class ExposedTime:
    """Adds up the seconds that are spent waiting."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._exchanges = 0

    @property
    def mean_seconds(self) -> float | None:
        """Per exchange; None before the first has ended."""
        return self._seconds / self._exchanges if self._exchanges else None

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the block's time."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - begin

    def exchange_ended(self) -> None:
        """Count an exchange."""
        self._exchanges += 1
