"""Measured seconds over sizes, with straight lines between the points."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.records import require_number


@dataclass(frozen=True)
class Table:
    """Measured `(size, seconds)` points in order of size; sizes are bytes, or elements.

    Below the first point its seconds hold; beyond the last the last line goes on, level if it
    would fall.
    """

    points: Sequence[tuple[float, float]]

    def __post_init__(self) -> None:
        for size, seconds in self.points:
            require_number("points", size, "bytes or elements")
            require_number("points", seconds)
        if len(self.points) < 2 or np.any(np.diff(self.sizes) <= 0):
            raise ValueError(
                "points must be at least two (size, seconds) pairs with sizes that increase, "
                f"got {self.points!r:.120}"
            )

    @property
    def sizes(self) -> NDArray[np.float64]:
        return self._columns[0]

    @cached_property
    def _columns(self) -> NDArray[np.float64]:
        return np.array(self.points, dtype=np.float64).T  # (2, points): sizes, seconds

    def __call__(self, size: ArrayLike) -> NDArray[np.float64]:
        """Seconds at `size` (a number or an array of any shape)."""
        known, seconds = self._columns
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
        sizes = np.asarray(size, dtype=np.float64)
        return np.interp(sizes, known, seconds) + slope * np.maximum(sizes - known[-1], 0.0)
