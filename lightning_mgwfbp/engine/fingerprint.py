"""`fingerprint`: 64 bits that stand for all bits of a tensor, computed where it lies.

Multilinear hashing (Carter and Wegman, 1979; Lemire and Kaser, 2014): the words of a tensor, at
most 32 bits each, are multiplied by random odd numbers, one for each position, and summed modulo
2^64. So a difference in one word is always seen, since an odd factor cannot make it vanish, and any
other one, such as words that have changed places, but for a chance of 2^-32 in the worst case: that
they differ in nothing but their highest bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

# Words that are multiplied at a time: as many as a cache holds. 100 MB of float32 take 25 ms of one
# core, as long as zlib.crc32; with 2^13 47 ms, of which the calls themselves are half.
_BLOCK_NUMEL = 2**17
_WORDS = {1: torch.int8, 2: torch.int16}
# Below that a copy beside others takes less time than a fingerprint of its own, 15 us.
_SMALL_NUMEL = 2**14


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return int64, (), on the device of `tensor`; equal for equal bits in the same order.

    Of any strided layout, whose elements are taken in the order of their indices. NaNs are equal if
    their bits are; 0.0 and -0.0 are not. Takes 2 MiB beside the tensor, or a copy of one that is
    not contiguous.
    """
    words = _words(tensor.detach())
    factors = _odd_numbers(tensor.device)
    while True:
        sums = [(block * factors[: block.numel()]).sum() for block in words.split(_BLOCK_NUMEL)]
        if len(sums) == 1:
            return sums[0]
        words = torch.stack(sums).view(torch.int32)


def fingerprint_of_all(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return int64, (), on `device`; equal for equal bits of all `tensors` in the same order.

    Args:
        tensors: (numel,) each, of any dtypes and devices, at least one.
        device: does not wait for that of `tensors` if it is the same.
    """
    large: list[Tensor] = []
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        is_small = tensor.numel() < _SMALL_NUMEL
        alike = small.setdefault((tensor.dtype, tensor.device), []) if is_small else large
        alike.append(tensor)
    together = [*large, *map(torch.cat, small.values())]
    return fingerprint(torch.stack([fingerprint(each).to(device) for each in together]))


def _words(tensor: Tensor) -> Tensor:
    """The bits as integers of at most 4 bytes, (words,)."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = real.resolve_neg().reshape(-1).contiguous()
    return flat.view(_WORDS.get(flat.dtype.itemsize, torch.int32))


@cache
def _odd_numbers(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**63), 2**63 - 1, (_BLOCK_NUMEL,), generator=generator)
    return (numbers | 1).to(device)
