"""Seconds from sizes: what planners and the simulator know of the network.

A `Cost` gives each gradient an additive size and each message of that size its seconds; who merges
compares `t(x) + t(y)` with `t(x + y)` and never sees a latency, a world size or a dtype.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.profile import ITEMSIZE, LayerProfile, ModelProfile
from lightning_mgwfbp.plan.records import Saved, dump, located, parse, require_number


@dataclass(frozen=True)
class AlphaBeta(Saved):
    """The modelled link, `t(m) = alpha + beta * m`: seconds, and seconds per byte."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        require_number("alpha", self.alpha)
        require_number("beta", self.beta, "seconds per byte")

    def __call__(self, nbytes: ArrayLike) -> NDArray[np.float64]:
        """Seconds for a message of `nbytes` (a number or an array of any shape)."""
        return self.alpha + self.beta * np.asarray(nbytes)

    def to_json(self) -> str:
        return dump(alpha=self.alpha, beta=self.beta)

    @classmethod
    def from_json(cls, text: str, source: str) -> "AlphaBeta":
        with located(source):
            return cls(**parse(text, ("alpha", "beta")))


class Cost(ABC):
    """What it costs to exchange merge groups, per gradient and per message."""

    @abstractmethod
    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        """Each gradient's size; a merge group's is their sum. Whole numbers, so sums are exact."""

    @abstractmethod
    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        """Seconds on the link for one message of `size` (a number or an array of any shape)."""

    @abstractmethod
    def least_seconds(self, size: float) -> float:
        """Seconds that no way of cutting `size` into messages undercuts."""

    def offsets(self, profile: ModelProfile) -> NDArray[np.float64]:
        """Size of all gradients before each: a group's is `offsets[stop] - offsets[start]`."""
        return np.concatenate(([0.0], np.cumsum(self.sizes(profile))))  # (layers + 1,)


@dataclass(frozen=True)
class DenseCost(Cost):
    """All-reduce of whole gradients over a link, in the wire dtype where that is narrower.

    A merge group of several dtypes is sent as one message per dtype, but is costed by its bytes
    alone, as one message: the start-ups of the others are neglected.
    """

    link: AlphaBeta
    wire_itemsize: int | None = None

    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        return wire_nbytes(profile, self.wire_itemsize)

    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        return self.link(size)

    def least_seconds(self, size: float) -> float:
        return float(self.link(size))


@dataclass(frozen=True)
class TableCost(Cost):
    """Measured `(nbytes, seconds)` points, in order of size, with straight lines between them.

    Below the first point its seconds hold; beyond the last the last line goes on, level if it
    would fall. Merge groups of several dtypes are costed by their bytes alone, as in `DenseCost`.
    """

    points: tuple[tuple[float, float], ...]
    wire_itemsize: int | None = None

    def __post_init__(self) -> None:
        for nbytes, seconds in self.points:
            require_number("points", nbytes, "bytes")
            require_number("points", seconds)
        if len(self.points) < 2 or np.any(np.diff(self._table[0]) <= 0):
            raise ValueError(
                "points must be at least two (nbytes, seconds) pairs with sizes that increase, "
                f"got {self.points!r:.120}"
            )

    @cached_property
    def _table(self) -> NDArray[np.float64]:
        return np.array(self.points, dtype=np.float64).T  # (2, points): nbytes, seconds

    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        return wire_nbytes(profile, self.wire_itemsize)

    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        nbytes, seconds = self._table
        slope = max(0.0, (seconds[-1] - seconds[-2]) / (nbytes[-1] - nbytes[-2]))
        sizes = np.asarray(size, dtype=np.float64)
        return np.interp(sizes, nbytes, seconds) + slope * np.maximum(sizes - nbytes[-1], 0.0)

    def least_seconds(self, size: float) -> float:
        # On each line t(m) / m is monotone, so its least value up to `size` is at a corner.
        nbytes = np.append(self._table[0], size)
        corners = nbytes[(nbytes > 0) & (nbytes <= size)]
        rate = (self.communicate(corners) / corners).min(initial=np.inf)
        return float(rate * size) if size > 0 else float(self.communicate(0.0))


def wire_nbytes(profile: ModelProfile, wire_itemsize: int | None) -> NDArray[np.float64]:
    """Bytes that each gradient puts on the wire; a wire dtype never widens a real."""  # (layers,)
    return np.array([_layer_wire_nbytes(layer, wire_itemsize) for layer in profile.layers], float)


def _layer_wire_nbytes(layer: LayerProfile, wire_itemsize: int | None) -> int:
    reals = 2 if layer.dtype.startswith("complex") else 1
    itemsize = ITEMSIZE[layer.dtype] // reals
    return layer.numel * reals * min(itemsize, wire_itemsize or itemsize)
