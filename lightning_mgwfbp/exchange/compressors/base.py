"""`Compressor`: what travels in the place of a merge group's gradients.

A compressor is one file, one frozen dataclass and one row of the table in `__init__.py`. It has no
state: what it leaves behind is kept by `ErrorFeedback`, by parameter name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

Wire = tuple[Tensor, ...]


@dataclass(frozen=True)
class Moment:
    """The one exchange that something is encoded for; the same on all ranks.

    Attributes:
        step: how many exchanges there were before; stochastic choices are drawn from it.
        density: the fraction of elements to send, in (0, 1]; only selections heed it.
    """

    step: int = 0
    density: float = 1.0


class Compressor(ABC):
    """Turns a flat buffer into what is sent, and back.

    For every buffer of finite numbers, bit for bit: decode(encode(buffer)) + rest == buffer. A
    number that is not finite, anywhere in the buffer, gives one after decoding, so that every rank
    sees it.
    """

    collective: ClassVar[Literal["all_reduce", "all_gather"]] = "all_gather"
    """all_reduce where wires can be summed as they are: then it is one tensor, of the buffer's
    dtype, with the same positions on all ranks."""

    # Fields of those that offer them:
    momentum_correction: float = 0.0
    local_clip_norm: float | None = None
    dense_below_numel: int = 0

    @abstractmethod
    def encode(self, buffer: Tensor, moment: Moment) -> Wire:
        """Return what travels for `buffer`, (numel,); shapes and dtypes are the same on all ranks.

        Must not change `buffer`, nor return views of it that `leave_residual` would.
        """

    @abstractmethod
    def decode(self, wire: Wire, total: Tensor, moment: Moment, weight: float = 1.0) -> None:
        """Add `weight` times the content of `wire` to `total`, (numel,)."""

    @abstractmethod
    def wire_nbytes(
        self, numel: ArrayLike, itemsize: ArrayLike, density: float = 1.0
    ) -> NDArray[np.float64]:
        """Bytes that travel for `numel` elements of `itemsize` bytes (numbers or arrays)."""

    def leave_residual(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
        """Take what `wire` carries out of `buffer`, (numel,), which was encoded to it."""
        self.decode(wire, buffer, moment, weight=-1.0)

    @property
    def settled_density(self) -> float:
        """The density that plans are made for: after a schedule, or the least one to choose."""
        return 1.0

    @property
    def asks_a_function(self) -> bool:
        """Whether `density_at` asks a user's function, which may answer otherwise elsewhere."""
        return False

    @property
    def plan_chooses_density(self) -> bool:
        """Whether the plan gives each merge group its own density."""
        return False

    def density_at(self, epoch: int, step: int) -> float:
        """The fraction of elements that travels then."""
        return 1.0


class Selection(Compressor):
    """Sends some elements exactly, and nothing of the others."""

    @abstractmethod
    def mask(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
        """Set any `buffer`, (numel,), to zero at the positions that `wire` carries."""

    def leave_residual(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
        self.mask(buffer, wire, moment)
