"""A failure here is a message whose parts are not read back as they were written."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loopback import same_bits
from torch import Tensor

from lightning_mgwfbp.exchange import messages

DTYPES = [torch.int8, torch.bfloat16, torch.int16, torch.float32, torch.int32, torch.float64]
PARTS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9)), min_size=1, max_size=6)


def part(dtype: torch.dtype, numel: int) -> Tensor:
    return torch.arange(1, numel + 1).neg().to(dtype)


@given(PARTS)
def test_what_was_joined_is_taken_apart(given: list[tuple[torch.dtype, int]]) -> None:
    """Odd sizes shift what comes after them, or a wide dtype starts where it must not."""
    parts = [part(dtype, numel) for dtype, numel in given]
    message = messages.join(parts)
    assert message.dtype == torch.uint8
    assert message.shape == (messages.nbytes(parts),)
    assert all(map(same_bits, messages.take_apart(message, parts), parts))


def test_shapes_are_kept() -> None:
    """Rows of an embedding come back flat."""
    rows = torch.randn(3, 5)
    (again,) = messages.take_apart(messages.join([rows]), [rows])
    assert same_bits(again, rows)


def test_like_need_not_hold_memory() -> None:
    """Another rank's message cannot be read where sizes differ, or a longer one is refused."""
    parts = [part(torch.int64, 3), part(torch.float32, 5)]
    padded = torch.nn.functional.pad(messages.join(parts), (0, 40))
    like = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in parts]
    assert all(map(same_bits, messages.take_apart(padded, like), parts))


@pytest.mark.parametrize(("numel", "nbytes"), [(0, 0), (1, 8), (8, 8), (9, 16)])
def test_parts_are_padded_by_less_than_eight_bytes(numel: int, nbytes: int) -> None:
    """Small parts travel as pages."""
    assert messages.nbytes([part(torch.int8, numel)]) == nbytes


def test_what_is_taken_apart_are_views() -> None:
    """Each message that is received is copied once more."""
    message = messages.join([torch.ones(4)])
    message.zero_()
    (values,) = messages.take_apart(message, [torch.empty(4)])
    assert not values.any()
    assert values.data_ptr() == message.data_ptr()
