"""Stateless compressors: what travels in the place of a merge group's gradients.

A compressor is one frozen dataclass and one row of `COMPRESSORS`. Multiplication by 1/world_size
comes before `encode`, so a narrow wire format cannot overflow in the sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


class Compressor(ABC):
    """Turns a flat buffer into what is sent, and back."""

    @abstractmethod
    def encode(self, buffer: Tensor) -> Tensor:
        """Return the wire form of `buffer`, (numel,). May be `buffer` itself."""

    @abstractmethod
    def decode(self, wire: Tensor, buffer: Tensor) -> None:
        """Write the content of `wire` into `buffer`, (numel,)."""

    @abstractmethod
    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes on the wire for `numel` elements of `dtype`."""


@dataclass(frozen=True)
class Cast(Compressor):
    """Send in a narrower floating-point type; sums are made in it too.

    A buffer whose own type is no wider (bfloat16 parameters under "fp16") travels as it is.

    Args:
        dtype: "float16" or "bfloat16".
    """

    dtype: Literal["float16", "bfloat16"]

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "bfloat16"):
            raise ValueError(
                f"`Cast(dtype=...)` must be 'float16' or 'bfloat16', got {self.dtype!r}."
            )

    @property
    def wire_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype == "float16" else torch.bfloat16

    def _narrows(self, dtype: torch.dtype) -> bool:
        return dtype.itemsize > self.wire_dtype.itemsize

    def encode(self, buffer: Tensor) -> Tensor:
        return buffer.to(self.wire_dtype) if self._narrows(buffer.dtype) else buffer

    def decode(self, wire: Tensor, buffer: Tensor) -> None:
        if wire is not buffer:
            buffer.copy_(wire)

    def wire_nbytes(self, numel: int, dtype: torch.dtype) -> int:
        return numel * min(dtype.itemsize, self.wire_dtype.itemsize)


COMPRESSORS: dict[str, Compressor] = {"fp16": Cast("float16"), "bf16": Cast("bfloat16")}


def resolve_compressor(compressor: str | Compressor | None) -> Compressor | None:
    """Return the compressor that a user's `compressor=` means.

    Raises:
        ValueError: neither None, a name of `COMPRESSORS` nor a `Compressor`.
    """
    if compressor is None or isinstance(compressor, Compressor):
        return compressor
    if isinstance(compressor, str) and compressor in COMPRESSORS:
        return COMPRESSORS[compressor]
    raise ValueError(
        f"`compressor=...` must be None, one of {sorted(COMPRESSORS)} or a Compressor,"
        f" got {compressor!r}."
    )
