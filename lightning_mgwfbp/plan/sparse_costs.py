"""Seconds of an exchange that selects: OMGS-SGD's model (INFOCOM'20, there also called MGS).

A merge group of n elements is selected on the compute stream, then its k = selected(n, density)
values and indices are all-gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.costs import AlphaBeta, Cost, reals
from lightning_mgwfbp.plan.profile import LayerProfile, ModelProfile
from lightning_mgwfbp.plan.records import require_count, require_density, require_number

FloatArray = NDArray[np.float64]

MOST_INT32_INDEXED = 2**31


@overload
def selected(numel: int, density: float) -> int: ...


@overload
def selected(numel: FloatArray, density: float) -> FloatArray: ...


def selected(numel: int | FloatArray, density: float) -> int | FloatArray:
    """How many of `numel` elements travel: k = max(1, round(density * numel)), and 0 of 0.

    Halves are rounded to even. Everybody who needs k asks here.
    """
    count = np.minimum(numel, np.maximum(1.0, np.rint(density * numel)))
    return int(count) if isinstance(numel, int) else count


def all_gather_link(alpha: float, beta: float, world_size: int) -> AlphaBeta:
    """A ring all-gather, by the bytes that each rank sends: P - 1 hops of `alpha + beta * m`."""
    return AlphaBeta((world_size - 1) * alpha, (world_size - 1) * beta)


def all_gather_like(all_reduce: AlphaBeta, world_size: int) -> AlphaBeta:
    """The all-gather of a link whose all-reduces take `all_reduce`, both as rings.

    2 (P - 1) hops of m / P bytes against P - 1 hops of m: half the start-ups, P / 2 times the
    bytes.
    """
    return AlphaBeta(all_reduce.alpha / 2, all_reduce.beta * world_size / 2)


@dataclass(frozen=True)
class TopKPairs:
    """Bytes of `selected(numel, density)` values with their indices, of 8 bytes past 2^31."""

    density: float

    def __post_init__(self) -> None:
        require_density("`TopKPairs(density=...)`", self.density)

    def __call__(self, numel: FloatArray, itemsize: FloatArray) -> FloatArray:
        """Arrays of one shape: elements to select from, and the bytes of one value."""
        index_itemsize = np.where(numel > MOST_INT32_INDEXED, 8, 4)
        return selected(numel, self.density) * (itemsize + index_itemsize)


@dataclass(frozen=True)
class SortSelection:
    """Selection by sorting n elements: `seconds * n * log2 n`."""

    seconds: float

    def __post_init__(self) -> None:
        require_number("`SortSelection(seconds=...)`", self.seconds)

    def __call__(self, numel: ArrayLike) -> FloatArray:
        numels = np.asarray(numel, dtype=np.float64)
        return self.seconds * numels * np.log2(np.maximum(numels, 1.0))


@dataclass(frozen=True)
class SparseCost(Cost):
    """Select on the compute stream, then all-gather what was selected.

    A size is three numbers: elements to select from, the bytes of their values, and the bytes of
    small parameters that travel whole in the same message. A complex number is two elements. As in
    `DenseCost`, a group of several dtypes is costed as one message: of values of their mean size.

    Args:
        link: the collective's, by the bytes that each rank sends; see `all_gather_link`.
        selection: seconds to select from so many elements: `SortSelection`, or a measured `Table`.
        wire_nbytes: bytes that `(numel, itemsize)` elements make on the wire, such as `TopKPairs`.
        exact_below: parameters of fewer elements are not compressed.
        least_itemsize: narrower values are widened to so many bytes; float32 accumulates them.
    """

    selects: ClassVar[bool] = True

    link: AlphaBeta
    selection: Callable[[FloatArray], FloatArray]
    wire_nbytes: Callable[[FloatArray, FloatArray], FloatArray]
    exact_below: int = 0
    least_itemsize: int = 4

    def __post_init__(self) -> None:
        require_count("`SparseCost(exact_below=...)`", self.exact_below)

    def sizes(self, profile: ModelProfile) -> FloatArray:
        return np.array([self._size(layer) for layer in profile.layers], float)  # (layers, 3)

    def _size(self, layer: LayerProfile) -> tuple[int, int, int]:
        if layer.numel < self.exact_below:
            return 0, 0, layer.nbytes
        numel, itemsize = reals(layer)
        return numel, numel * max(itemsize, self.least_itemsize), 0

    def select(self, size: ArrayLike) -> FloatArray:
        numel = np.asarray(size)[..., 0]
        return np.where(numel > 0, self.selection(numel), 0.0)

    def nbytes(self, size: ArrayLike) -> FloatArray:
        numel, value_nbytes, exact_nbytes = np.moveaxis(np.asarray(size), -1, 0)
        itemsize = value_nbytes / np.maximum(numel, 1.0)
        return self.wire_nbytes(numel, itemsize) + exact_nbytes

    def communicate(self, size: ArrayLike) -> FloatArray:
        return self.link(self.nbytes(size))


@dataclass(frozen=True)
class CheaperCost(Cost):
    """Every group goes the way that is sooner through, `select + communicate`; dense if equal.

    A size is the dense one, a number, followed by the sparse one's numbers.
    """

    selects: ClassVar[bool] = True

    dense: Cost
    sparse: SparseCost

    def sizes(self, profile: ModelProfile) -> FloatArray:
        return np.column_stack((self.dense.sizes(profile), self.sparse.sizes(profile)))

    def is_dense(self, size: ArrayLike) -> NDArray[np.bool_]:
        """Whether groups of `size` travel whole."""
        dense, sparse = self._split(size)
        sparse_seconds = self.sparse.select(sparse) + self.sparse.communicate(sparse)
        return self.dense.communicate(dense) <= sparse_seconds

    def select(self, size: ArrayLike) -> FloatArray:
        _, sparse = self._split(size)
        return np.where(self.is_dense(size), 0.0, self.sparse.select(sparse))

    def nbytes(self, size: ArrayLike) -> FloatArray:
        dense, sparse = self._split(size)
        return np.where(self.is_dense(size), self.dense.nbytes(dense), self.sparse.nbytes(sparse))

    def communicate(self, size: ArrayLike) -> FloatArray:
        dense, sparse = self._split(size)
        return np.where(
            self.is_dense(size), self.dense.communicate(dense), self.sparse.communicate(sparse)
        )

    @staticmethod
    def _split(size: ArrayLike) -> tuple[FloatArray, FloatArray]:
        sizes = np.asarray(size)
        return sizes[..., 0], sizes[..., 1:]
