"""A failure here is `Quantize8` rounding where it must not, or where it must to another number."""

import math
from typing import Any

import pytest
import torch
from loopback import same_bits
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import Moment, Quantize8, quantize8


def random_buffer(seed: int, low: float, high: float, dtype: torch.dtype) -> Tensor:
    """(1000,), of either sign, magnitudes spread evenly over the decades from `low` to `high`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(2, 1000, generator=generator, dtype=torch.float64)
    return ((drawn[0] - 0.5).sign() * 10.0 ** (low + (high - low) * drawn[1])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["all magnitudes", "one magnitude", "least", "largest"])
@pytest.mark.parametrize("seed", range(3))
def test_quantizing_is_exact_at_the_ends_of_the_range(
    dtype: torch.dtype, kind: str, seed: int
) -> None:
    """A unit that is no normal number, or a difference that is rounded."""
    largest = math.log10(torch.finfo(dtype).max) - 1e-6
    least = math.log10(torch.finfo(dtype).smallest_normal) - 6
    decades = {
        "all magnitudes": (least, largest),
        "one magnitude": (0.0, 1.0),
        "least": (least, least + 8),
        "largest": (largest - 3, largest),
    }[kind]
    buffer = random_buffer(seed, *decades, dtype)
    buffer[3] = {"largest": torch.finfo(dtype).max, "least": 2.0**-149}.get(kind, 0.0)
    compressor, moment = Quantize8(block_numel=64), Moment()
    wire = compressor.encode(buffer, moment)
    total, rest = torch.zeros_like(buffer), buffer.clone()
    compressor.decode(wire, total, moment)
    compressor.leave_residual(rest, wire, moment)
    assert torch.equal(total + rest, buffer)
    for part, left in zip(buffer.split(64), rest.split(64), strict=True):
        unit = max(part.abs().max().item() / 64, torch.finfo(dtype).smallest_normal)
        assert left.abs().max() < unit  # half of it but where 127 is as far as it goes


def test_quantizing_rounds_to_the_nearest() -> None:
    """Values of 8 bits that are not the nearest ones."""
    buffer = torch.tensor([100.0, 63.4, 63.6, -0.6, 0.4, -127.9, 0.0])
    mantissas, exponents = Quantize8().encode(buffer, Moment())
    assert exponents.tolist() == [0]
    assert mantissas.tolist() == [100, 63, 64, -1, 0, -127, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_the_block_with_a_number_that_is_not_finite_is_lost(value: float) -> None:
    """The mark of such a block, or the place of the short last one."""
    buffer = torch.ones(70)
    buffer[66] = value
    compressor, total = Quantize8(block_numel=32), torch.zeros(70)
    compressor.decode(compressor.encode(buffer, Moment()), total, Moment())
    is_lost = total.isnan()
    assert is_lost.tolist() == [False] * 64 + [True] * 6


@pytest.mark.parametrize("numel", [1, 63, 64, 640, 1000])
def test_chunks_leave_no_trace(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks at the end of a chunk, which real merge groups have and short buffers do not."""
    buffer = random_buffer(5, -3.0, 3.0, torch.float32)[:numel]
    compressor = Quantize8(block_numel=64)
    at_once = compressor.encode(buffer, Moment())
    expected, total = torch.zeros_like(buffer), torch.zeros_like(buffer)
    compressor.decode(at_once, expected, Moment())
    monkeypatch.setattr(quantize8, "_CHUNK_NUMEL", 128)
    assert all(map(same_bits, compressor.encode(buffer, Moment()), at_once))
    compressor.decode(at_once, total, Moment())
    assert same_bits(total, expected)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"block_numel": 0}, r"block_numel=\.\.\.\)` must be at least 1, got 0"),
    *(
        ({"block_numel": value}, r"block_numel=\.\.\.\)` must be a whole number")
        for value in (-1, 2.5, True)
    ),
    *(
        ({"dense_below_numel": value}, r"dense_below_numel=\.\.\.\)` must be a whole number")
        for value in (-1, 1.5, True)
    ),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], expected: str) -> None:
    """A typing error trains with other numbers than the user thinks, or fails far away."""
    with pytest.raises(ValueError, match=rf"`Quantize8\({expected}"):
        Quantize8(**options)
