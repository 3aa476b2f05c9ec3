"""A failure here is a wire format that loses more than its dtype's rounding."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from lightning_mgwfbp.exchange.compressors import COMPRESSORS, Cast, Compressor, resolve_compressor


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_decode_gives_encode_back_within_rounding(name: str, dtype: torch.dtype) -> None:
    """encode or decode drops or reorders something."""
    compressor = COMPRESSORS[name]
    assert isinstance(compressor, Cast)
    values = torch.linspace(0.01, 2, 101, dtype=dtype)
    values[::2] *= -1
    buffer = values.clone()
    wire = compressor.encode(buffer)
    assert wire.dtype == compressor.wire_dtype
    buffer.fill_(torch.nan)
    compressor.decode(wire, buffer)
    half_a_unit = torch.finfo(compressor.wire_dtype).eps / 2
    assert torch.all((buffer - values).abs() <= half_a_unit * values.abs())
    assert torch.all(buffer.sign() == values.sign())


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_as_narrow_travels_as_it_is(name: str, dtype: torch.dtype) -> None:
    """A second rounding: bfloat16 gradients squeezed through float16 overflow."""
    buffer = torch.tensor([1.0, -0.5], dtype=dtype)
    wire = COMPRESSORS[name].encode(buffer)
    assert wire is buffer
    COMPRESSORS[name].decode(wire, buffer)
    assert buffer.tolist() == [1.0, -0.5]


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_wire_nbytes_is_what_encode_makes(name: str, dtype: torch.dtype) -> None:
    """Planners are told another size than the one that travels."""
    buffer = torch.zeros(17, dtype=dtype)
    assert COMPRESSORS[name].wire_nbytes(17, dtype) == COMPRESSORS[name].encode(buffer).nbytes


def test_compressors_are_values() -> None:
    """Ranks compare options by their text, so equal compressors must read the same."""
    assert Cast("float16") == COMPRESSORS["fp16"]
    assert repr(Cast("float16")) == repr(COMPRESSORS["fp16"])
    with pytest.raises(FrozenInstanceError):
        COMPRESSORS["fp16"].dtype = "bfloat16"  # type: ignore[attr-defined]


def test_resolve() -> None:
    """A name, or a compressor, means another compressor than it says."""
    assert resolve_compressor(None) is None
    assert resolve_compressor("bf16") == Cast("bfloat16")
    own = Cast("float16")
    assert resolve_compressor(own) is own


@pytest.mark.parametrize("given", ["fp8", "FP16", 16, True, Cast, ["fp16"]])
def test_resolve_refuses_the_rest(given: object) -> None:
    """A typing error trains without compression, or fails far away."""
    with pytest.raises(ValueError, match=r"`compressor=\.\.\.` must be None, one of .*bf16.*fp16"):
        resolve_compressor(given)  # type: ignore[arg-type]


def test_cast_refuses_other_dtypes() -> None:
    """The same, one level below."""
    with pytest.raises(ValueError, match=r"`Cast\(dtype=\.\.\.\)` .*got 'int8'"):
        Cast("int8")  # type: ignore[arg-type]


def test_compressor_is_abstract() -> None:
    """A compressor that forgot a method fails in the middle of training."""
    with pytest.raises(TypeError, match="abstract"):
        Compressor()  # type: ignore[abstract]
