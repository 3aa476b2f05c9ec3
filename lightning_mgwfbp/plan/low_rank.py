"""Seconds of an exchange of low-rank factors: PowerSGD (Vogels et al., NeurIPS'19)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lightning_mgwfbp.plan.costs import AlphaBeta, Cost, reals
from lightning_mgwfbp.plan.profile import LayerProfile, ModelProfile


@dataclass(frozen=True)
class LowRankCost(Cost):
    """Two all-reduces for each merge group, the second one made from the first's result.

    The products are not costed. A size is bytes in both messages together.

    Args:
        link: the all-reduce's.
        wire_numel: numbers that travel for a parameter of a shape.
    """

    link: AlphaBeta
    wire_numel: Callable[[tuple[int, ...]], int]

    def sizes(self, profile: ModelProfile) -> NDArray[np.float64]:
        return np.array([self._size(layer) for layer in profile.layers], dtype=np.float64)

    def _size(self, layer: LayerProfile) -> int:
        count, itemsize = reals(layer)
        if layer.shape is not None and count == layer.numel:  # complex ones travel exactly
            count = self.wire_numel(layer.shape)
        return count * itemsize

    def communicate(self, size: ArrayLike) -> NDArray[np.float64]:
        return self.link.alpha + self.link(size)

    def least_seconds(self, size: ArrayLike) -> float:
        return float(self.communicate(size))
