"""What the two halves of an all-reduce cost: a reduce-scatter, and later an all-gather."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.costs import AlphaBeta, Cost, wire_nbytes
from lightning_mgwfbp.plan.profile import ModelProfile
from lightning_mgwfbp.plan.table import Table

FloatArray = NDArray[np.float64]
Half = AlphaBeta | Table


@dataclass(frozen=True)
class HalvesCost(Cost):
    """Seconds of each half, by the bytes that all ranks have in common: those of an all-reduce.

    As a `Cost` it is that of both in a row.
    """

    reduce_scatter: Half
    all_gather: Half
    wire_itemsize: int | None = None

    @classmethod
    def of_all_reduce(cls, link: AlphaBeta, wire_itemsize: int | None = None) -> "HalvesCost":
        """Halves of an all-reduce over `link`, each of half its seconds."""
        half = AlphaBeta(link.alpha / 2, link.beta / 2)
        return cls(half, half, wire_itemsize)

    def sizes(self, profile: ModelProfile) -> FloatArray:
        return wire_nbytes(profile, self.wire_itemsize)

    def communicate(self, size: ArrayLike) -> FloatArray:
        return self.reduce_scatter(size) + self.all_gather(size)

    def least_seconds(self, size: ArrayLike) -> float:
        return float(self.least_seconds_within(size, float(np.asarray(size))))

    def least_seconds_within(self, size: ArrayLike, total: float) -> FloatArray:
        """Seconds that no messages undercut which carry `size`, whatever else of `total` with it.

        If no message takes less than `c + d * bytes`, with c and d at least 0, then messages that
        carry m bytes of those wanted take `c + d * m` together: there is at least one. Of all such
        lines below the seconds of messages up to `total` the highest counts.

        Args:
            size: one, or an array of any shape; each at most `total`.
            total: of all gradients.
        """
        wanted = np.asarray(size, dtype=np.float64)
        return _highest_line(self.reduce_scatter, wanted, total) + _highest_line(
            self.all_gather, wanted, total
        )


def _highest_line(half: Half, size: FloatArray, total: float) -> FloatArray:
    """The highest of the lines, with no negative term, that lie below `half` up to `total`."""
    between = half.sizes if isinstance(half, Table) else np.zeros(0)
    corners = np.unique([0.0, *between[between < total], total])
    seconds = half(corners)
    highest = np.full(size.shape, seconds.min())
    rate = (seconds[1:] / corners[1:]).min(initial=np.inf)
    if np.isfinite(rate):
        np.maximum(highest, rate * size, out=highest)
    for i, j in combinations(range(len(corners)), 2):
        slope = (seconds[j] - seconds[i]) / (corners[j] - corners[i])
        intercept = (seconds - slope * corners).min()
        if min(slope, intercept) > 0:
            np.maximum(highest, intercept + slope * size, out=highest)
    return highest
