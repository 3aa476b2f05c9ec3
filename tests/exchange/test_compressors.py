"""A failure here is a compressor that loses something between gradient, wire and rest."""

import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonargparse import ArgumentParser
from loopback import same_bits
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import (
    COMPRESSORS,
    Cast,
    Compressor,
    Moment,
    Quantize8,
    RandomK,
    TopK,
    as_written,
)

TABLE: dict[str, Compressor] = {
    **COMPRESSORS,
    "topk exact": TopK(selection="exact"),
    "topk sampled": TopK(selection="sampled"),
    "randomk seed": RandomK(0.5, seed=2**40),
    "int8 of 32": Quantize8(block_numel=32),
    "int8 of 1": Quantize8(block_numel=1),
}
each = pytest.mark.parametrize("compressor", TABLE.values(), ids=TABLE)
wide_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)

# Decades of magnitudes at which decode(encode(buffer)) + rest is promised.
DECADES = {Cast("float16"): (-4.0, 4.77), Cast("bfloat16"): (-30.0, 30.0)}
MOMENTS = st.builds(Moment, st.integers(0, 5), st.floats(0.001, 1.0))
NUMELS = st.integers(1, 3000)


def random_buffer(
    numel: int, seed: int, decades: tuple[float, float] = (-3.0, 3.0), dtype: Any = torch.float32
) -> Tensor:
    """Either sign, magnitudes spread evenly over `decades`, and here and there 0.0 and -0.0."""
    generator = torch.Generator().manual_seed(seed)
    low, high = decades
    exponents = low + (high - low) * torch.rand(numel, generator=generator, dtype=torch.float64)
    signs = torch.randint(2, (numel,), generator=generator) * 2 - 1
    is_zero = torch.rand(numel, generator=generator) < (seed % 3) / 4
    return (signs * torch.where(is_zero, 0.0, 10.0**exponents)).to(dtype)


def test_what_was_given_by_name_is_called_so() -> None:
    """A message holds eight fields where the user wrote one word, or hides a user's own fields."""
    assert [as_written(known) for known in COMPRESSORS.values()] == [repr(n) for n in COMPRESSORS]
    own = TopK()
    assert as_written(own) == repr(own)
    assert as_written(None) == "None"


def decoded(compressor: Compressor, buffer: Tensor, moment: Moment) -> Tensor:
    total = torch.zeros_like(buffer)
    compressor.decode(compressor.encode(buffer, moment), total, moment)
    return total


@each
@wide_dtypes
@settings(deadline=None, max_examples=40)
@given(numel=NUMELS, seed=st.integers(0, 2**20), moment=MOMENTS)
def test_what_is_sent_and_the_rest_are_all_bit_for_bit(
    compressor: Compressor, dtype: torch.dtype, numel: int, seed: int, moment: Moment
) -> None:
    """Gradients are lost or counted twice; encode changes the buffer, or what is left the wire."""
    buffer = random_buffer(numel, seed, DECADES.get(compressor, (-30.0, 30.0)), dtype)  # type: ignore[call-overload]
    rest, total = buffer.clone(), torch.zeros_like(buffer)
    wire = compressor.encode(rest, moment)
    assert same_bits(rest, buffer)
    kept = [part.clone() for part in wire]
    compressor.leave_residual(rest, wire, moment)
    assert all(map(same_bits, wire, kept))
    compressor.decode(wire, total, moment)
    assert torch.equal(total + rest, buffer)


@each
@settings(deadline=None, max_examples=40)
@given(numel=NUMELS, seed=st.integers(0, 2**20), moment=MOMENTS)
def test_wires_have_the_size_that_planners_are_told(
    compressor: Compressor, numel: int, seed: int, moment: Moment
) -> None:
    """Ranks whose messages differ in size hang; plans are made for another message."""
    for dtype in (torch.float32, torch.float64):
        wires = [
            compressor.encode(buffer, moment)
            for buffer in (random_buffer(numel, seed, dtype=dtype), torch.zeros(numel, dtype=dtype))
        ]
        first, second = ([(part.shape, part.dtype) for part in wire] for wire in wires)
        assert first == second
        told = compressor.wire_nbytes(numel, dtype.itemsize, moment.density)
        assert told == sum(part.nbytes for part in wires[0])


@each
def test_planners_ask_for_many_sizes_at_once(compressor: Compressor) -> None:
    """Arrays are told other sizes than numbers."""
    numels, itemsizes = np.array([1, 255, 256, 257, 10_000]), np.array([4, 8, 4, 8, 4])
    told = compressor.wire_nbytes(numels, itemsizes, 0.01)
    pairs = zip(numels.tolist(), itemsizes.tolist(), strict=True)
    assert told.tolist() == [float(compressor.wire_nbytes(*pair, 0.01)) for pair in pairs]
    assert compressor.wire_nbytes(0, 4, 0.01) == 0


@each
@wide_dtypes
def test_equal_buffers_and_moments_have_equal_wires(
    compressor: Compressor, dtype: torch.dtype
) -> None:
    """A choice that depends on what was encoded before."""
    buffer = random_buffer(1000, seed=1, dtype=dtype)
    wires = [compressor.encode(buffer, Moment(3, 0.1)) for _ in range(2)]
    assert all(map(same_bits, *wires))


@each
def test_decode_adds_with_a_weight(compressor: Compressor) -> None:
    """What other ranks sent is overwritten, or the mean is none."""
    moment = Moment(density=0.1)
    buffer = random_buffer(1000, seed=3)
    total = torch.ones_like(buffer)
    compressor.decode(compressor.encode(buffer, moment), total, moment, weight=0.25)
    assert torch.equal(total, 1 + 0.25 * decoded(compressor, buffer, moment))


@pytest.mark.parametrize("compressor", [c for c in TABLE.values() if c.collective == "all_reduce"])
def test_wires_that_are_summed_mean_the_sum(compressor: Compressor) -> None:
    """Ranks send different positions in one place."""
    moment = Moment(7, 0.1)
    first, second = (torch.randint(-8, 9, (1000,)).float() for _ in range(2))
    (ours,), (theirs,) = (compressor.encode(buffer, moment) for buffer in (first, second))
    total = torch.zeros_like(first)
    compressor.decode((ours + theirs,), total, moment)
    expected = decoded(compressor, first, moment) + decoded(compressor, second, moment)
    assert torch.equal(total, expected)


@each
@wide_dtypes
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_by_all(
    compressor: Compressor, dtype: torch.dtype, value: float
) -> None:
    """One rank's overflow stays unseen, and the others step."""
    for position in (0, 1, 500, 998, 999):
        buffer = random_buffer(1000, seed=2, dtype=dtype)
        buffer[position] = value
        assert not decoded(compressor, buffer, Moment(density=0.1)).isfinite().all()


@each
def test_compressors_are_values(compressor: Compressor) -> None:
    """Ranks compare options by their text; checkpoints and processes pickle them."""
    copy = pickle.loads(pickle.dumps(compressor))
    assert copy == compressor
    assert hash(copy) == hash(compressor)
    assert repr(copy) == repr(compressor)
    assert eval(repr(compressor)) == compressor
    with pytest.raises(FrozenInstanceError):
        compressor.dense_below_numel = 0


def test_every_name_means_another_compressor() -> None:
    """A row of the table that hides another one."""
    assert list(COMPRESSORS) == ["fp16", "bf16", "topk", "randomk", "int8"]
    assert len(set(COMPRESSORS.values())) == len(COMPRESSORS)


def test_compressor_is_abstract() -> None:
    """A compressor that forgot a method fails in the middle of training."""
    with pytest.raises(TypeError, match="abstract"):
        Compressor()  # type: ignore[abstract]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_what_is_as_narrow_travels_as_it_is(name: str, dtype: torch.dtype) -> None:
    """A second rounding: bfloat16 gradients squeezed through float16 overflow."""
    buffer = torch.tensor([1.0, -0.5], dtype=dtype)
    (wire,) = COMPRESSORS[name].encode(buffer, Moment())
    assert same_bits(wire, buffer)
    assert COMPRESSORS[name].wire_nbytes(2, 2) == wire.nbytes


def test_cast_refuses_other_dtypes() -> None:
    """A typing error trains without compression, or fails far away."""
    with pytest.raises(ValueError, match=r"`Cast\(dtype=\.\.\.\)` .*got 'int8'"):
        Cast("int8")  # type: ignore[arg-type]


def halving(at: int) -> float:
    return 0.5**at


CONFIGURED: list[tuple[str, dict[str, Any], Compressor]] = [
    ("Cast", {"dtype": "float16"}, Cast("float16")),
    ("TopK", {}, TopK()),
    ("TopK", {"density": "auto", "density_floor": 0.01}, TopK("auto", density_floor=0.01)),
    (
        "TopK",
        {"density": 1, "selection": "exact", "density_schedule": [1, 0.25], "local_clip_norm": 1},
        TopK(1.0, "exact", (1.0, 0.25), local_clip_norm=1),
    ),
    (
        "RandomK",
        {"density": 0.1, "density_schedule": f"{__name__}.halving", "schedule_unit": "step"},
        RandomK(0.1, density_schedule=halving, schedule_unit="step"),
    ),
    ("Quantize8", {"block_numel": 64}, Quantize8(64)),
]


@pytest.mark.parametrize(("name", "options", "expected"), CONFIGURED)
def test_a_configuration_file_builds_them(
    name: str, options: dict[str, Any], expected: Compressor
) -> None:
    """An annotation that jsonargparse does not understand."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--compressor", type=Compressor)
    path = f"lightning_mgwfbp.exchange.compressors.{name}"
    given = parser.parse_object({"compressor": {"class_path": path, "init_args": options}})
    built = parser.instantiate_classes(given).compressor
    assert built == expected
    assert repr(built) == repr(expected)
