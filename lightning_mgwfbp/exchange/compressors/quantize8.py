"""`Quantize8`: send blocks of 8-bit integers, each with a power of two that they are multiples of.

Block floating point as the MXINT8 format of OCP's Microscaling specification (v1.0, 2023) has it,
with larger blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_mgwfbp.exchange.compressors.base import Compressor, Moment, Wire
from lightning_mgwfbp.plan.records import require_count

_CHUNK_NUMEL = 2**20  # what is made of a chunk stays in the cache


class _Layout(NamedTuple):
    """How numbers of a floating-point dtype lie in memory."""

    bits: torch.dtype
    fraction_bits: int
    bias: int
    exponent: torch.dtype  # wide enough for its exponents


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 127, torch.int8),
    torch.float64: _Layout(torch.int64, 52, 1023, torch.int16),
}


@dataclass(frozen=True)
class Quantize8(Compressor):
    """Send each block's elements as 8-bit multiples q of a power of two, its unit.

    The largest magnitude is 64 to 128 units; q is the nearest multiple, at most 127 in magnitude.
    So x - q * unit is exact: both terms are multiples of x's last place, and the difference is no
    larger than |x| (half a unit unless q is 0 or 127), so it needs no more bits than x has.

    A block with a number that is not finite decodes to NaN.

    Args:
        block_numel: elements that share a unit; the last block may be shorter.
        dense_below_numel: parameters of fewer elements travel exactly.

    Raises:
        ValueError: an argument is not such a number.
    """

    block_numel: int = 256
    dense_below_numel: int = 4096

    def __post_init__(self) -> None:
        require_count("`Quantize8(block_numel=...)`", self.block_numel)
        if self.block_numel == 0:
            raise ValueError("`Quantize8(block_numel=...)` must be at least 1, got 0.")
        require_count("`Quantize8(dense_below_numel=...)`", self.dense_below_numel)

    def encode(self, buffer: Tensor, moment: Moment) -> Wire:
        """Return q, (numel,) of int8, and the units' exponents, (blocks,); float32 and float64."""
        mantissas = torch.empty_like(buffer, dtype=torch.int8)
        exponents = []
        for blocks, quantized in zip(self._blocks(buffer), self._blocks(mantissas), strict=True):
            largest = blocks.abs().amax(1)
            exponent = _unit_exponent(largest)
            scaled = blocks * _power_of_two(-exponent, buffer.dtype).unsqueeze(1)
            quantized.copy_(scaled.round_().clamp_(-127, 127))
            exponents.append(_with_not_finite_marked(exponent, largest))
        return mantissas, torch.cat(exponents)

    def decode(self, wire: Wire, total: Tensor, moment: Moment, weight: float = 1.0) -> None:
        mantissas, exponents = wire
        sums = list(self._blocks(total))
        units = _units(exponents, total.dtype).split([len(blocks) for blocks in sums])
        for blocks, quantized, unit in zip(sums, self._blocks(mantissas), units, strict=True):
            blocks.add_(quantized * unit.unsqueeze(1), alpha=weight)

    def wire_nbytes(
        self, numel: ArrayLike, itemsize: ArrayLike, density: float = 1.0
    ) -> NDArray[np.float64]:
        numels = np.asarray(numel, dtype=np.float64)
        exponent_nbytes = np.where(np.asarray(itemsize) > 4, 2, 1)
        return numels + np.ceil(numels / self.block_numel) * exponent_nbytes

    def _blocks(self, flat: Tensor) -> Iterator[Tensor]:
        """Views of `flat`, (numel,), each (blocks, block_numel); the short block comes last."""
        whole = flat.numel() // self.block_numel * self.block_numel
        rows = max(1, _CHUNK_NUMEL // self.block_numel)
        yield from flat[:whole].view(-1, self.block_numel).split(rows)
        if whole < flat.numel():
            yield flat[whole:].unsqueeze(0)


def _unit_exponent(largest: Tensor) -> Tensor:
    """floor(log2(largest)) - 6, but such that the unit and its inverse are normal numbers."""
    bias = _LAYOUTS[largest.dtype].bias
    return (torch.frexp(largest).exponent - 7).clamp_(1 - bias, bias - 6)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly, for exponents of normal numbers: made from its bits."""
    layout = _LAYOUTS[dtype]
    return ((exponent.to(layout.bits) + layout.bias) << layout.fraction_bits).view(dtype)


def _with_not_finite_marked(exponent: Tensor, largest: Tensor) -> Tensor:
    """`exponent` as it travels: the least integer, which no unit has, for blocks to become NaN."""
    narrow = exponent.to(_LAYOUTS[largest.dtype].exponent)
    return narrow.masked_fill_(~largest.isfinite(), torch.iinfo(narrow.dtype).min)


def _units(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    is_marked = exponents == torch.iinfo(exponents.dtype).min
    return _power_of_two(exponents, dtype).masked_fill_(is_marked, torch.nan)
