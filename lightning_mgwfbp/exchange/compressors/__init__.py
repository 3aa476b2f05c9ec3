"""Stateless compressors: what travels in the place of a merge group's gradients."""

from lightning_mgwfbp.exchange.compressors.base import Compressor, Moment, Selection, Wire
from lightning_mgwfbp.exchange.compressors.cast import Cast
from lightning_mgwfbp.exchange.compressors.quantize8 import Quantize8
from lightning_mgwfbp.exchange.compressors.random_k import RandomK
from lightning_mgwfbp.exchange.compressors.top_k import TopK

COMPRESSORS: dict[str, Compressor] = {
    "fp16": Cast("float16"),
    "bf16": Cast("bfloat16"),
    "topk": TopK(),
    "randomk": RandomK(0.01),
    "int8": Quantize8(),
}


def as_written(method: object) -> str:
    """What a user has given as `compressor=`: the name of one of these, or the text of another."""
    return repr(next((name for name, known in COMPRESSORS.items() if known is method), method))


__all__ = [
    "COMPRESSORS",
    "Cast",
    "Compressor",
    "Moment",
    "Quantize8",
    "RandomK",
    "Selection",
    "TopK",
    "Wire",
    "as_written",
]
