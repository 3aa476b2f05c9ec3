"""What differs between the ranks' weights: which parts, at which element, and by how much.

All functions are collective, and return the same on all ranks. They are for ranks that know
already that something differs, so what they cost does not matter while all is well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.fingerprint import fingerprint
from lightning_mgwfbp.engine.weight_slices import Part
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.transport import Transport

T = TypeVar("T")

WHAT = "what stands for the weights"
_MOST_VALUES_SHOWN = 4
_BLOCK_NUMEL = 2**20  # numbers that are subtracted at a time, in float64


def everyones(mine: T, transport: Transport) -> list[T]:
    """Every rank's value, in the order of ranks."""
    with exchange_errors(transport.rank, WHAT):
        return transport.all_gather_object(mine, key="divergence")


def differing_parts(parts: Sequence[Part], transport: Transport) -> list[Part]:
    """Those of `parts` whose bits are not the same on all ranks; 8 bytes for each part travel."""
    home = parts[0].parameter.device
    prints = torch.stack([fingerprint(part.numbers()).to(home) for part in parts])  # (parts,)
    by_part = zip(*everyones(prints.tolist(), transport), strict=True)  # (parts,) of (ranks,)
    return [part for part, values in zip(parts, by_part, strict=True) if len(set(values)) > 1]


def first_difference(part: Part, transport: Transport) -> str:
    """Say at which index a part first differs, and what it is there on each rank.

    Found by bisection: its fingerprints travel, in some thirty messages for a large part.
    """
    flat = part.numbers()
    begin, end = 0, flat.numel()
    while end - begin > 1:
        middle = (begin + end) // 2
        if len(set(everyones(int(fingerprint(flat[begin:middle])), transport))) == 1:
            begin = middle
        else:
            end = middle
    index = np.unravel_index(part.begin + begin, part.parameter.shape)
    place = [int(i) for i in index]
    values = everyones((int(fingerprint(flat[begin])), repr(flat[begin].item())), transport)
    return f"{part.name!r}{place if place else ''} is {_values(values)}"


def relative_differences(parts: Sequence[Part], transport: Transport) -> list[float]:
    """How far any rank is from rank 0 in each part, as a multiple of the root mean square of the
    whole parameter on rank 0.

    Infinite where a number is finite on one rank only, where all of the parameter is 0 on rank 0,
    and where the part differs and holds integers or booleans, which nothing rounds. NaNs are equal.
    The numbers of all parts travel, and take their size in memory.
    """
    theirs = [part.numbers().clone() for part in parts]
    with exchange_errors(transport.rank, "weights that differ"):
        broadcast_tensors(theirs, 0, transport)
    mine = [_largest(part.numbers(), t) for part, t in zip(parts, theirs, strict=True)]
    scales = [_root_mean_square(p.parameter) for p in parts] if transport.rank == 0 else []
    said = everyones((mine, scales), transport)
    by_part = zip(*(differences for differences, _ in said), strict=True)
    largest = [max(differences) for differences in by_part]
    return [
        difference / scale if scale else (math.inf if difference else 0.0)
        for difference, scale in zip(largest, said[0][1], strict=True)
    ]


def _is_rounded(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(mine: Tensor, theirs: Tensor) -> float:
    """The largest |mine - theirs|; neither is empty."""
    if not _is_rounded(mine):
        return 0.0 if torch.equal(mine, theirs) else math.inf
    largest = []
    for ours, others in zip(mine.split(_BLOCK_NUMEL), theirs.split(_BLOCK_NUMEL), strict=True):
        a, b = _wide(ours), _wide(others)
        alike = (a == b) | (a.isnan() & b.isnan())  # infinities, too
        far = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        largest.append(far.masked_fill(alike, 0.0).max())
    return float(torch.stack(largest).max())


def _root_mean_square(parameter: Tensor) -> float:
    """Of the finite numbers among all of them; 1 for integers."""
    if not _is_rounded(parameter):
        return 1.0
    squares, numel = 0.0, 0
    for block in parameter.detach().reshape(-1).split(_BLOCK_NUMEL):
        values = _wide(block)
        norm = float(torch.linalg.vector_norm(values))
        if not math.isfinite(norm):
            values = values[values.isfinite()]
            norm = float(torch.linalg.vector_norm(values))
        squares += norm**2
        numel += values.numel()
    return math.sqrt(squares / max(numel, 1))


def _values(values: Sequence[tuple[int, str]]) -> str:
    """Say which ranks hold which of the values, (ranks,), each its bits and its text."""
    holders: dict[tuple[int, str], list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    said = [f"{text} on {_ranks(ranks)}" for (_, text), ranks in holders.items()]
    if len(said) > _MOST_VALUES_SHOWN:
        said[_MOST_VALUES_SHOWN:] = [f"{len(said) - _MOST_VALUES_SHOWN} more elsewhere"]
    return " and ".join(said)


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] is "ranks 0-2, 5"."""
    together = groupby(enumerate(ranks), lambda counted: counted[1] - counted[0])
    runs = [[rank for _, rank in run] for _, run in together]
    said = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(said)
