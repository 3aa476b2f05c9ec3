"""Seconds from sizes: what planners and the simulator know of an exchange.

A `Cost` gives each gradient an additive size, and each merge group of that size its seconds on two
clocks: selecting on the compute stream, then communicating on the link. Who merges compares
`t(x) + t(y)` with `t(x + y)` and never sees a latency, a world size, a dtype or a density.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.profile import ITEMSIZE, LayerProfile, ModelProfile
from lightning_mgwfbp.plan.records import Saved, dump, located, parse, require_number
from lightning_mgwfbp.plan.table import Table


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

    def __str__(self) -> str:
        alpha = f"alpha {self.alpha * 1e6:.1f} us, beta "
        if self.beta == 0:
            return alpha + "0: the link is faster than messages of these sizes can show"
        return f"{alpha}{self.beta * 1e9:.3g} ns per byte"

    def to_json(self) -> str:
        return dump(alpha=self.alpha, beta=self.beta)

    @classmethod
    def from_json(cls, text: str, source: str) -> "AlphaBeta":
        with located(source):
            return cls(**parse(text, ("alpha", "beta")))


class Cost(ABC):
    """What it costs to exchange merge groups.

    A size is a number, or a vector of `d` numbers where one does not say enough: all arrays of
    sizes are then longer by a last axis of `d`. Users of a cost add and subtract sizes only.
    """

    selects: ClassVar[bool] = False
    """Whether some group may take seconds on the compute stream."""

    @abstractmethod
    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        """Each gradient's size, (layers,) or (layers, d); a merge group's is their sum.

        Whole numbers, so that sums are exact.
        """

    def nbytes(self, size: ArrayLike) -> NDArray[np.float64]:
        """Bytes of the message of a group of `size`: itself, unless said otherwise."""
        return np.asarray(size, dtype=np.float64)

    @abstractmethod
    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        """Seconds on the link for one message of `size` (one, or an array of any shape)."""

    def select(self, size: ArrayLike) -> NDArray[np.float64]:
        """Seconds on the compute stream before a group of `size` can be sent: none if dense."""
        return np.zeros(np.shape(size))

    def least_seconds(self, size: ArrayLike) -> float:
        """Seconds on the link that no way of cutting `size` into messages undercuts.

        0 where nothing better is proved.
        """
        return 0.0

    def offsets(self, profile: ModelProfile) -> NDArray[np.float64]:
        """Size of all gradients before each: a group's is `offsets[stop] - offsets[start]`."""
        sizes = self.sizes(profile)
        return np.concatenate((np.zeros_like(sizes[:1]), np.cumsum(sizes, axis=0)))  # layers + 1

    def group_sizes(
        self, profile: ModelProfile, groups: Sequence[tuple[int, int]]
    ) -> NDArray[np.float64]:
        """Size of each merge group, (groups,) or (groups, d)."""
        offsets = self.offsets(profile)
        starts, stops = map(list, zip(*groups, strict=True))
        return offsets[stops] - offsets[starts]


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

    def least_seconds(self, size: ArrayLike) -> float:
        return float(self.link(size))


@dataclass(frozen=True)
class TableCost(Cost):
    """Measured `(nbytes, seconds)` points, as in `Table`.

    Merge groups of several dtypes are costed by their bytes alone, as in `DenseCost`.
    """

    points: tuple[tuple[float, float], ...]
    wire_itemsize: int | None = None

    def __post_init__(self) -> None:
        assert self._table  # made now, so that it checks the points

    @cached_property
    def _table(self) -> Table:
        return Table(self.points)

    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        return wire_nbytes(profile, self.wire_itemsize)

    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        return self._table(size)

    def least_seconds(self, size: ArrayLike) -> float:
        # On each line t(m) / m is monotone, so its least value up to `size` is at a corner.
        whole = float(np.asarray(size))
        nbytes = np.append(self._table.sizes, whole)
        corners = nbytes[(nbytes > 0) & (nbytes <= whole)]
        rate = (self.communicate(corners) / corners).min(initial=np.inf)
        return float(rate * whole) if whole > 0 else float(self.communicate(0.0))


def wire_nbytes(profile: ModelProfile, wire_itemsize: int | None) -> NDArray[np.float64]:
    """Bytes that each gradient puts on the wire; a wire dtype never widens a real."""  # (layers,)
    return np.array([_layer_wire_nbytes(layer, wire_itemsize) for layer in profile.layers], float)


def _layer_wire_nbytes(layer: LayerProfile, wire_itemsize: int | None) -> int:
    numel, itemsize = reals(layer)
    return numel * min(itemsize, wire_itemsize or itemsize)


def reals(layer: LayerProfile) -> tuple[int, int]:
    """How many real numbers a gradient holds, and the bytes of each: two per complex number."""
    parts = 2 if layer.dtype.startswith("complex") else 1
    return layer.numel * parts, ITEMSIZE[layer.dtype] // parts
