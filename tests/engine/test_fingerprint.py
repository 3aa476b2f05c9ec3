"""A failure here is a difference in bits that goes unseen, or one where there is none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mgwfbp.engine.fingerprint import (
    _BLOCK_NUMEL,
    _SMALL_NUMEL,
    fingerprint,
    fingerprint_of_all,
)

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(5))
    return values.to(torch.float32).to(dtype)


def with_bit_flipped(tensor: Tensor, bit: int) -> Tensor:
    """A copy of a contiguous tensor, of 1 dimension or more, that differs in one bit."""
    real = torch.view_as_real(tensor.clone()) if tensor.is_complex() else tensor.clone()
    data = real.view(-1).view(torch.uint8)
    data[bit // 8] ^= 1 << bit % 8
    return torch.view_as_complex(real) if tensor.is_complex() else real


@each_dtype
def test_every_bit_counts(dtype: torch.dtype) -> None:
    """A bit of some dtype is not looked at, or two of them lead to the same fingerprint."""
    tensor = some(dtype, 3)
    flips = range(8, 16) if dtype == torch.bool else range(8 * tensor.nbytes)
    prints = [int(fingerprint(with_bit_flipped(tensor, bit))) for bit in flips]
    assert len({*prints, int(fingerprint(tensor))}) == len(flips) + 1


@each_dtype
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 7)], ids=str)
def test_equal_bits_have_equal_prints(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A shape or dtype that cannot be read, or whose fingerprint is not a function of its bits."""
    tensor = some(dtype, *shape)
    assert fingerprint(tensor).shape == ()
    assert fingerprint(tensor).dtype == torch.int64
    assert torch.equal(fingerprint(tensor), fingerprint(tensor.clone()))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([0.0], [-0.0]),
        ([1.0, -1.0], [-1.0, 1.0]),
        ([1.0, 2.0, 3.0], [1.0, 3.0, 2.0]),
        ([[1.0, 2.0], [3.0, 4.0]], [[3.0, 4.0], [1.0, 2.0]]),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 3.0], [2.0, 4.0]]),
        ([0.0, 1.0], [1.0, 0.0]),
        ([1.0], [float("nan")]),
    ],
)
def test_what_values_or_sums_do_not_tell_apart(ours: list[float], theirs: list[float]) -> None:
    """A zero's sign, or what has changed places: elements, rows, rows with columns."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        prints = [fingerprint(torch.tensor(values, dtype=dtype)) for values in (ours, theirs)]
        assert not torch.equal(*prints)


def test_not_a_number_equals_itself() -> None:
    """A NaN that all ranks have counts as a difference."""
    nan = torch.tensor([1.0, float("nan")])
    assert torch.equal(fingerprint(nan), fingerprint(nan.clone()))


def test_strides_do_not_count() -> None:
    """Equal weights in another memory format, or part of another tensor, count as different."""
    weight = torch.randn(4, 3, 5, 5)
    plain = fingerprint(weight)
    assert torch.equal(fingerprint(weight.to(memory_format=torch.channels_last)), plain)
    assert torch.equal(fingerprint(weight.mT.contiguous().mT), plain)
    assert torch.equal(fingerprint(torch.stack([weight, weight], -1)[..., 1]), plain)
    assert torch.equal(fingerprint(weight.expand(2, 4, 3, 5, 5)[1]), plain)
    odd = torch.zeros(weight.nbytes + 4, dtype=torch.uint8)[4:].view(torch.float32)
    assert torch.equal(fingerprint(odd.copy_(weight.view(-1)).view_as(weight)), plain)
    whole = torch.randn(3, dtype=torch.complex64)
    assert torch.equal(fingerprint(whole.conj()), fingerprint(whole.conj().resolve_conj()))


@settings(deadline=None)
@given(st.data())
def test_several_blocks(data: st.DataObject) -> None:
    """A word beyond the first block is not looked at, or blocks may change places."""
    tensor = torch.arange(2 * _BLOCK_NUMEL + 3, dtype=torch.int32)
    whole = fingerprint(tensor)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, len(tensor) - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert not torch.equal(fingerprint(changed), whole)
    first, second, rest = tensor.split(_BLOCK_NUMEL)
    assert not torch.equal(fingerprint(torch.cat((second, first, rest))), whole)


def test_a_parameter_stays_as_it_is() -> None:
    """A fingerprint belongs to a graph, or changes what it is taken of."""
    weight = torch.nn.Parameter(torch.ones(3))
    assert not fingerprint(weight).requires_grad
    assert torch.equal(weight, torch.ones(3))
    assert weight.grad is None


def test_any_of_several_tensors() -> None:
    """One of many tensors does not count, being small, large, or of a dtype of its own."""
    tensors = [some(dtype, 2) for dtype in DTYPES for _ in range(2)]
    tensors += [some(torch.float32, _SMALL_NUMEL + extra) for extra in (-1, 0, 1)]

    def print_of(given: list[Tensor]) -> int:
        return int(fingerprint_of_all(given, torch.device("cpu")))

    prints = {print_of(tensors)}
    assert prints == {print_of([t.clone() for t in tensors])}
    for place, tensor in enumerate(tensors):
        bit = 8 if tensor.dtype == torch.bool else 8 * tensor.nbytes - 1
        flipped = with_bit_flipped(tensor, bit)
        prints.add(print_of([*tensors[:place], flipped, *tensors[place + 1 :]]))
    assert len(prints) == len(tensors) + 1
