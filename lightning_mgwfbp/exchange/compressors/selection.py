"""Positions of the elements of largest magnitude.

Both selections are exact: they return `k` distinct positions whose magnitudes are the `k` largest.
Among equal magnitudes either may choose. NaN ranks above infinity, and that above the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_MAGNITUDE_BITS = {
    torch.float32: (torch.int32, 2**31 - 1),
    torch.float64: (torch.int64, 2**63 - 1),
}
_SAMPLE_NUMEL = 2**14
_CHUNK_NUMEL = 2**18  # what is made of a chunk stays in a core's cache

# Where `sampled_top_k` was the faster one on a CPU core (benchmarks/selection.py).
_SAMPLED_FROM_NUMEL = 2**17
_SAMPLED_UP_TO_DENSITY = 1 / 8


def exact_top_k(buffer: Tensor, k: int) -> Tensor:
    """Return positions, (k,), of the largest magnitudes of `buffer`, (numel,)."""
    return torch.topk(buffer.abs(), k, sorted=False).indices


def sampled_top_k(buffer: Tensor, k: int) -> Tensor:
    """The same, several times faster for large buffers and small `k`, by looking at few elements.

    A sample gives a threshold that slightly more than `k` magnitudes are above; one pass finds
    those, and the smallest of them are dropped. Where they are too few, because many magnitudes
    equal the threshold (zeros), these fill up; where that does not do either, or the dtype is
    narrow, it is `exact_top_k`.

    The sampled positions are random, as periodic data could hide from a stride, but always the
    same. Waits for the device.
    """
    rank = _rank_in_sample(k / buffer.numel())
    if buffer.dtype not in _MAGNITUDE_BITS or rank > _SAMPLE_NUMEL:
        return exact_top_k(buffer, k)
    threshold = _largest_in_sample(buffer, rank)
    above = _positions_above(buffer, threshold)
    if above.numel() >= k:
        return _without_smallest(buffer, above, above.numel() - k)
    equal = _first_positions_at(buffer, threshold, k - above.numel())
    if above.numel() + equal.numel() == k:
        return torch.cat((above, equal))
    return exact_top_k(buffer, k)


def faster_top_k(buffer: Tensor, k: int) -> Tensor:
    """The same, by whichever of the two is faster; on an accelerator the one that does not wait."""
    is_sparse = k <= _SAMPLED_UP_TO_DENSITY * buffer.numel()
    if buffer.is_cpu and buffer.numel() >= _SAMPLED_FROM_NUMEL and is_sparse:
        return sampled_top_k(buffer, k)
    return exact_top_k(buffer, k)


SELECTIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "exact": exact_top_k,
    "sampled": sampled_top_k,
    "auto": faster_top_k,
}


def _magnitudes(values: Tensor) -> Tensor:
    """Integers in the order of the magnitudes of `values`: floating-point bits without the sign."""
    dtype, bits = _MAGNITUDE_BITS[values.dtype]
    return values.view(dtype) & bits


def _rank_in_sample(density: float) -> int:
    """Which largest element of the sample is exceeded by too few only once in 30,000 buffers."""
    expected = density * _SAMPLE_NUMEL
    return math.ceil(expected + 4 * math.sqrt(expected)) + 4  # four standard deviations; Poisson


def _largest_in_sample(buffer: Tensor, rank: int) -> int:
    """The magnitude, as an integer, of the `rank`-th largest element of the sample."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(buffer.numel(), (_SAMPLE_NUMEL,), generator=generator)
    sample = _magnitudes(buffer[positions.to(buffer.device)])
    return int(sample.kthvalue(_SAMPLE_NUMEL + 1 - rank).values)


def _positions_above(buffer: Tensor, threshold: int) -> Tensor:
    """Positions, ascending, whose magnitude as an integer is above `threshold`."""
    numel = buffer.numel()
    padded = -(-numel // 8) * 8
    is_above = torch.empty(padded, dtype=torch.bool, device=buffer.device)
    is_above[numel:] = False
    for chunk, is_chunk_above in zip(
        buffer.split(_CHUNK_NUMEL), is_above[:numel].split(_CHUNK_NUMEL), strict=True
    ):
        torch.gt(_magnitudes(chunk), threshold, out=is_chunk_above)
    # few are: eight at a time are looked at as one integer first, four times as fast
    eights = is_above.view(torch.int64).nonzero().squeeze(1)
    row, column = is_above.view(-1, 8)[eights].nonzero().unbind(1)
    return eights[row] * 8 + column


def _without_smallest(buffer: Tensor, positions: Tensor, count: int) -> Tensor:
    """Drop the `count` positions of smallest magnitude; the others keep their order."""
    magnitudes = _magnitudes(buffer[positions])
    smallest = torch.topk(magnitudes, count, largest=False, sorted=False).indices
    return positions[torch.ones_like(positions, dtype=torch.bool).index_fill_(0, smallest, False)]


def _first_positions_at(buffer: Tensor, threshold: int, count: int) -> Tensor:
    """The first positions whose magnitude as an integer is `threshold`: `count`, or all."""
    found: list[Tensor] = []
    start = 0
    for chunk in buffer.split(_CHUNK_NUMEL):
        equal = (_magnitudes(chunk) == threshold).nonzero().squeeze(1)[:count]
        found.append(equal + start)
        start += chunk.numel()
        count -= equal.numel()
        if count == 0:
            break
    return torch.cat(found)
