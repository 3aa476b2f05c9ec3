"""A failure here is a number of the weights that is in no slice, or in two."""

from __future__ import annotations

from itertools import chain

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_mgwfbp.engine.weight_slices import slices_of

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=4), max_size=6)


def numbered(shapes: list[list[int]], channels_last: bool) -> list[tuple[str, nn.Parameter]]:
    """Parameters that hold 0, 1, 2 and so on, one behind the other."""
    named, start = [], 0
    for shape in shapes:
        values = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float64)
        values = values.view(shape)
        if channels_last and len(shape) == 4:
            values = values.to(memory_format=torch.channels_last)
        elif channels_last and len(shape) == 2:
            values = values.t().contiguous().t()
        start += values.numel()
        named.append((f"w{len(named)}", nn.Parameter(values)))
    return named


@settings(max_examples=200, deadline=None)
@given(shapes=SHAPES, count=st.integers(1, 30), channels_last=st.booleans())
def test_every_number_is_in_one_slice(
    shapes: list[list[int]], count: int, channels_last: bool
) -> None:
    """A number that no rotation compares, one compared twice, or slices of unequal cost."""
    named = numbered(shapes, channels_last)
    total = sum(p.numel() for _, p in named)
    slices = slices_of(named, count)
    assert len(slices) == min(count, total)
    held = [[part.numbers() for part in parts] for parts in slices]
    flat: list[Tensor] = [each for each in chain(*held) if each.dim() == 1]
    assert torch.cat([torch.empty(0), *flat]).tolist() == list(range(total))
    sizes = [sum(each.numel() for each in parts) for parts in held]
    assert not sizes or max(sizes) - min(sizes) <= 1


def test_parts_say_where_their_numbers_are() -> None:
    """An error names another element than the one that differs."""
    named = numbered([[3, 5], [], [2, 2]], channels_last=True)
    for part in chain(*slices_of(named, 7)):
        whole = part.parameter.detach().reshape(-1)
        assert torch.equal(part.numbers(), whole[part.begin : part.end])
        assert dict(named)[part.name] is part.parameter


def test_little_is_copied() -> None:
    """A slice through a large parameter in channels_last copies all of it, in each turn."""
    weight = nn.Parameter(torch.zeros(100, 8, 3, 3).to(memory_format=torch.channels_last))
    for parts in slices_of([("w", weight)], 33):
        (part,) = parts
        assert part.numbers().untyped_storage().nbytes() < weight.nbytes / 10
    dense = nn.Parameter(torch.zeros(100, 8))
    for parts in slices_of([("w", dense)], 33):
        place = parts[0].numbers().untyped_storage().data_ptr()
        assert place == dense.untyped_storage().data_ptr()
