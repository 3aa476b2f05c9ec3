"""`Cast`: send in a narrower floating-point type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_mgwfbp.exchange.compressors.base import Compressor, Moment, Wire


@dataclass(frozen=True)
class Cast(Compressor):
    """Send in a narrower floating-point type; sums are made in it too, and roundings forgotten.

    A buffer whose own type is no wider (bfloat16 parameters under "fp16") travels as it is.

    Args:
        dtype: "float16" or "bfloat16".
    """

    collective: ClassVar[Literal["all_reduce", "all_gather"]] = "all_reduce"

    dtype: Literal["float16", "bfloat16"]

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"`Cast(dtype=...)` must be 'float16' or 'bfloat16', got {self.dtype!r}."
            )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a buffer of `dtype` travels."""
        narrow = torch.float16 if self.dtype == "float16" else torch.bfloat16
        return narrow if dtype.itemsize > narrow.itemsize else dtype

    def narrowed(self, buffer: Tensor) -> Tensor:
        """`buffer` in the wire dtype; itself where that is its own."""
        return buffer.to(self.wire_dtype(buffer.dtype))

    def encode(self, buffer: Tensor, moment: Moment) -> Wire:
        wire = self.narrowed(buffer)
        return (wire.clone() if wire is buffer else wire,)

    def decode(self, wire: Wire, total: Tensor, moment: Moment, weight: float = 1.0) -> None:
        total.add_(wire[0], alpha=weight)

    def wire_nbytes(
        self, numel: ArrayLike, itemsize: ArrayLike, density: float = 1.0
    ) -> NDArray[np.float64]:
        return np.asarray(numel, dtype=np.float64) * np.minimum(itemsize, 2)
