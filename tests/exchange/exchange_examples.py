"""Buckets with a few parameters, exchanged step by step as the reducer would."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressed import CompressedExchanger
from lightning_mgwfbp.exchange.compressors import Compressor, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.exchangers import Exchanger
from lightning_mgwfbp.exchange.transport import Transport

SHAPES = {"large": (50, 20), "filters": (4, 3, 3, 3), "bias": (7,), "scalar": (), "empty": (0, 4)}
EXACT_BELOW = 50
NAMES = tuple(SHAPES)
SPLIT = (NAMES[:1], NAMES[1:])
COMPRESSORS = {
    "topk": TopK(density=0.1, dense_below_numel=EXACT_BELOW),
    "randomk": RandomK(density=0.1, dense_below_numel=EXACT_BELOW),
    "int8": Quantize8(dense_below_numel=EXACT_BELOW),
}
each = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


class Run:
    """One rank's buckets, of `groups` of parameters, exchanged step by step."""

    def __init__(
        self,
        exchanger: Exchanger,
        groups: Sequence[Sequence[str]] = (NAMES,),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.exchanger = exchanger
        self.rank = exchanger.transport.rank
        self.dtype = dtype
        self.buckets = []
        for names in groups:
            parameters = [torch.zeros(SHAPES[n], dtype=dtype) for n in names]
            compressed = sum(map(exchanger.compresses, parameters))
            self.buckets.append(Bucket(parameters, names, compressed))
        exchanger.adopt(self.buckets)

    def gradients(self, step: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(101 * step + self.rank)
        drawn = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
        return {n: g.to(self.dtype) for n, g in drawn.items()}

    def step(
        self,
        step: int,
        *,
        poison: str = "",
        scale: float = 1.0,
        density: float | None = None,
        others: Sequence[Tensor] = (),
    ) -> dict[str, Tensor]:
        """Return the averages."""
        given = {n: g * scale for n, g in self.gradients(step).items()}
        if poison:
            given[poison].view(-1)[-1] = math.inf if step % 2 else math.nan
        if self.exchanger.needs_whole_gradient:
            self.exchanger.prepare(given.values())
        exchanges = []
        for number, bucket in enumerate(self.buckets):
            bucket.pack([given[n] for n in bucket.names], [True] * len(bucket.names))
            key = f"bucket {number}"
            exchanges.append(self.exchanger.start(bucket, key=key, density=density))
        for exchange in exchanges:
            exchange.finish()
        averages = {
            n: g.clone() for b in self.buckets for n, g in zip(b.names, b.gradients(), strict=True)
        }
        assert all(all(bucket.used()) for bucket in self.buckets)
        assert not any(bucket.noticed() for bucket in self.buckets)
        self.exchanger.conclude(others)
        return averages

    @property
    def state(self) -> dict[str, Any]:
        return self.exchanger.state_dict()


def compressed_run(transport: Transport, compressor: Compressor, *options: Any) -> Run:
    return Run(CompressedExchanger(transport, compressor), *options)
