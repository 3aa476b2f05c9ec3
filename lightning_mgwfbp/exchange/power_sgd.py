"""`PowerSGD`: a gradient that is a matrix travels as two thin factors, with error feedback.

Vogels, Karimireddy, Jaggi: "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
Optimization", NeurIPS 2019. With M = gradient + residual, (n, m), on each rank, means over the
ranks, and Q, (m, rank), from the step before, algorithm 1 is one step of subspace iteration:

    P = orthonormal(mean(M Q)),  Q = mean(M^T P),  average = P Q^T,  residual = M - average.

So M == average + residual on every rank, and nothing is lost: mean(M) == average + mean(residual).

[Note: order] Q needs the sum of P, so a bucket takes two messages. `start` first launches the
second message of the bucket started before, whose first one has been on its way since then; the
first `finish` launches that of the last bucket. The order is the same on all ranks.

[Note: transposed] P and Q are made and sent as P^T and Q^T: on CPUs products with few long rows are
ten times as fast as those with few columns.

[Note: unused] A rank without a gradient sends its residual all the same: only the mean of the
residuals of all completes the average. Where no rank has a gradient, they stay as they were.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket, accumulation_dtype
from lightning_mgwfbp.exchange.error_feedback import own_or_mean
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchange, FeedbackExchanger
from lightning_mgwfbp.exchange.transport import Transport


@dataclass(frozen=True)
class PowerSGD:
    """Send matrices as factors of low rank; what they do not capture is sent later.

    A parameter of two or more dimensions is a matrix, (shape[0], the rest). Each rank keeps a
    residual as large as the matrices, in float32 or wider, and a second one during a step.
    Factors travel in the parameters' dtype.

    Args:
        rank: columns of each factor; more capture more of a gradient.
        dense_below_numel: smaller parameters travel exactly, as do vectors, complex ones, and
            matrices whose factors would be no smaller than themselves.
    """

    rank: int = 4
    dense_below_numel: int = 4096

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("dense_below_numel", 0)):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, int) or given < least:
                raise ValueError(
                    f"`PowerSGD({name}=...)` must be a whole number of at least {least}, got"
                    f" {given!r}; leave it out for {getattr(PowerSGD, name)}."
                )

    def wire_numel(self, shape: Sequence[int]) -> int:
        """Numbers of its dtype that travel for a parameter of `shape`, in both messages."""
        numel = prod(shape)
        if len(shape) < 2 or numel < self.dense_below_numel:
            return numel
        return min(numel, (shape[0] + prod(shape[1:])) * self.rank)


class PowerSGDExchanger(FeedbackExchanger):
    """Averages by PowerSGD; residual and Q of each parameter are kept by its name.

    Ranks orthonormalise the same bytes, each for itself: they need the same kind of device.
    """

    def __init__(self, transport: Transport, method: PowerSGD) -> None:
        super().__init__(transport)
        self._method = method
        self._residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._half_sent: _FactoredExchange | None = None  # [Note: order]
        self._aside: dict[str, tuple[Tensor, Tensor]] = {}

    def compresses(self, parameter: Tensor) -> bool:
        travels = self._method.wire_numel(parameter.shape)
        return travels < parameter.numel() and not parameter.is_complex()

    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> Exchange:
        self.note_started(bucket)
        self.send_second()
        if not bucket.compressed:
            return DenseExchanger(self.transport).start(bucket, key=key)
        self._half_sent = _FactoredExchange(self, bucket, self.loss_scale, key)
        return self._half_sent

    def send_second(self) -> None:
        """Launch the second message that is due, if one is."""
        due, self._half_sent = self._half_sent, None
        if due is not None:
            due.send_second()

    def accumulate(self, bucket: Bucket, scale: float) -> tuple[list[Tensor], list[Tensor]]:
        """M, contiguous and of the parameter's shape, and Q^T, (rank, m), of each to compress."""
        residuals, factors = [], []
        like = bucket.buffer[:0].to(accumulation_dtype(bucket.buffer.dtype))
        named_shapes = list(zip(bucket.names, bucket.shapes, strict=True))
        for name, shape in named_shapes[: bucket.compressed]:
            residual, factor = self._residuals.get(name), self._factors.get(name)
            if residual is None:
                residual = like.new_zeros(shape)
            elif residual.shape != shape:
                shapes = f"{tuple(residual.shape)}, but the parameter {tuple(shape)}"
                raise ValueError(
                    f"The residual of {name!r} has shape {shapes}: it was saved for another model."
                )
            factor_shape = (self._method.rank, prod(shape[1:]))
            if factor is None or factor.shape != factor_shape:  # saved under another rank=...
                factor = _first_factor(name, factor_shape)
            residuals.append(residual.to(like))
            factors.append(factor.to(like))
        # laid out as the first summand, which is contiguous
        sums = torch._foreach_add(residuals, _to_compress(bucket), alpha=1 / scale)
        return list(sums), factors

    def write_aside(self, bucket: Bucket, residuals: list[Tensor], factors: list[Tensor]) -> None:
        """Write aside what a finished exchange leaves behind."""
        averages, used = _to_compress(bucket), bucket.used()
        for i, name in enumerate(bucket.names[: bucket.compressed]):
            if used[i]:
                self._aside[name] = residuals[i], factors[i]
            else:  # [Note: unused]
                averages[i].zero_()

    def _commit(self) -> None:
        for name, left in self._aside.items():
            self._residuals[name], self._factors[name] = left
        self._aside.clear()

    def _drop(self) -> None:
        self._aside.clear()

    def forget(self, names: Collection[str]) -> None:
        self.settle()
        for name in names:
            self._residuals.pop(name, None)
            self._factors.pop(name, None)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        kept = {"residual": self._residuals, "factor": self._factors}
        return {kind: {n: t.to("cpu", copy=True) for n, t in kept[kind].items()} for kind in kept}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        self.settle()
        kept = [{kind: state.get(kind, {}) for kind in ("residual", "factor")} for state in states]
        own = own_or_mean(kept, self.transport.rank, self.transport.world_size)
        self._residuals, self._factors = own["residual"], own["factor"]


class _FactoredExchange:
    """Sends [P of all matrices | exact gradients | tail], then Q of all matrices."""

    def __init__(self, owner: PowerSGDExchanger, bucket: Bucket, scale: float, key: str) -> None:
        self._owner, self._bucket, self._scale, self._key = owner, bucket, scale, key
        self._residuals, self._factors = owner.accumulate(bucket, scale)  # rests after `finish`
        self._matrices = [each.view(each.shape[0], -1) for each in self._residuals]
        transport = owner.transport
        self._weight = scale / transport.world_size  # scaled, as suits the dtype's range
        ps = [_product(q, m.t()) for m, q in zip(self._matrices, self._factors, strict=True)]
        exact = bucket.buffer[bucket.body_numel :] * (1.0 / transport.world_size)
        self._first = torch.cat([_joined(ps, self._weight, exact.dtype), exact])
        self._pending = transport.all_reduce(self._first, key=f"{key} P")

    def send_second(self) -> None:
        self._pending.wait()
        means = _parted(self._first, [m.shape[0] for m in self._matrices], self._factors)
        self._ps = [torch.linalg.qr(mean.t()).Q for mean in means]  # (n, rank) each
        qs = [_product(p.t(), m) for m, p in zip(self._matrices, self._ps, strict=True)]
        self._second = _joined(qs, self._weight, self._first.dtype)
        self._pending = self._owner.transport.all_reduce(self._second, key=f"{self._key} Q")

    def finish(self) -> None:
        self._owner.send_second()
        self._pending.wait()
        exact = self._bucket.buffer[self._bucket.body_numel :]
        exact.copy_(self._first[-exact.numel() :])
        qs = _parted(self._second, [m.shape[1] for m in self._matrices], self._factors)
        averages = _to_compress(self._bucket)
        for average, p, q in zip(averages, self._ps, qs, strict=True):
            average.copy_(_product(p, q).view(average.shape))
        # from what was put back, so that its rounding to the bucket's dtype is sent later too
        torch._foreach_sub_(self._residuals, averages, alpha=1 / self._scale)
        warm = [_warm(q, before) for q, before in zip(qs, self._factors, strict=True)]
        self._owner.write_aside(self._bucket, self._residuals, warm)


def _to_compress(bucket: Bucket) -> list[Tensor]:
    return bucket.as_gradients(bucket.data)[: bucket.compressed]


def _first_factor(name: str, shape: tuple[int, int]) -> Tensor:
    """The Q^T to begin with, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, dtype=torch.float32, generator=generator)


def _warm(q: Tensor, before: Tensor) -> Tensor:
    """The next step's Q^T: rows of length 1, since M Q could overflow with longer ones, and the row
    of before where one is zero, which would find nothing ever again."""
    norms = torch.linalg.vector_norm(q, dim=1, keepdim=True)  # (rank, 1)
    return torch.where(norms > 0, q / norms, before)


def _product(left: Tensor, right: Tensor) -> Tensor:
    # backward may be called under autocast, which would round the factors
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def _joined(factors: list[Tensor], weight: float, dtype: torch.dtype) -> Tensor:
    return torch.cat([each.reshape(-1) for each in factors]).mul_(weight).to(dtype)


def _parted(flat: Tensor, lengths: list[int], like: list[Tensor]) -> list[Tensor]:
    """The factors, (rank, length) each, that `flat` begins with, in the dtype of `like`."""
    rank = like[0].shape[0]
    sizes = [each * rank for each in lengths]
    parts = flat[: sum(sizes)].to(like[0].dtype).split(sizes)
    return [part.view(rank, -1) for part in parts]
