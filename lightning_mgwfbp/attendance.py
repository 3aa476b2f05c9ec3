"""`Attendance`: whether a rank is missing although nobody has failed."""

from __future__ import annotations

import time
from datetime import timedelta

from lightning_mgwfbp.engine.errors import require_presence


class Attendance:
    """Calls the roll before a batch that has been long in coming.

    Before each batch Lightning broadcasts whether to stop, and takes a failure for a no: the
    exchange that follows would wait for the missing rank once more.

    Args:
        limit: how long a collective may take.
    """

    def __init__(self, limit: timedelta) -> None:
        self._limit_seconds = limit.total_seconds()
        self._last_batch_at: float | None = None

    def batch_begins(self) -> None:
        """To be called before anything of a batch is exchanged.

        Raises:
            ExchangeError: naming the missing rank.
        """
        before, self._last_batch_at = self._last_batch_at, time.monotonic()
        if before is not None and self._last_batch_at - before > self._limit_seconds:
            require_presence()
