"""`Part` and `slices_of`: all weights in equal shares of their numbers, across parameters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Part:
    """The numbers [begin, end) of a parameter, in the order of their indices; never none.

    A complex number counts as one.
    """

    name: str
    parameter: nn.Parameter
    begin: int
    end: int

    def numbers(self) -> Tensor:
        """(end - begin,), where they lie, or a copy if the parameter is not contiguous."""
        tensor = self.parameter.detach()
        if tensor.is_contiguous():
            return tensor.view(-1)[self.begin : self.end]
        # whole rows first, so that no more than those are copied
        row_numel = tensor.numel() // len(tensor)
        first = self.begin // row_numel
        rows = tensor[first : -(-self.end // row_numel)].reshape(-1)
        return rows[self.begin - first * row_numel :][: self.end - self.begin]


def slices_of(named_parameters: Iterable[tuple[str, nn.Parameter]], count: int) -> list[list[Part]]:
    """Cut all numbers, one parameter behind the other, into `count` runs that differ by one number
    at most; fewer runs where there are fewer numbers.

    Returns:
        The parts of each run.
    """
    named = list(named_parameters)
    total = sum(p.numel() for _, p in named)
    count = min(count, total)
    bounds = [total * number // max(count, 1) for number in range(count + 1)]
    slices: list[list[Part]] = [[] for _ in range(count)]
    start = 0
    for name, parameter in named:
        stop = start + parameter.numel()
        for number in _overlapping(bounds, start, stop):
            begin, end = max(bounds[number], start), min(bounds[number + 1], stop)
            slices[number].append(Part(name, parameter, begin - start, end - start))
        start = stop
    return slices


def _overlapping(bounds: Sequence[int], start: int, stop: int) -> range:
    """Which runs have numbers in [start, stop)."""
    if start == stop:
        return range(0)
    return range(bisect_right(bounds, start) - 1, bisect_right(bounds, stop - 1))
