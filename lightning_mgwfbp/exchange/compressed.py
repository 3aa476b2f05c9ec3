"""`CompressedExchanger`: sends what a compressor makes of a bucket, and keeps the rest.

One message for each bucket carries the wire form of what may be compressed, the other gradients
exactly, and the tail. Where that would be no smaller than an all-reduce of everything (the early
part of a density schedule; many ranks), everything travels, rests included.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_mgwfbp.exchange import messages
from lightning_mgwfbp.exchange.buckets import Bucket, accumulation_dtype
from lightning_mgwfbp.exchange.compressors import as_written
from lightning_mgwfbp.exchange.compressors.base import Compressor, Moment, Selection
from lightning_mgwfbp.exchange.error_feedback import ErrorFeedback, own_or_mean
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchange, FeedbackExchanger
from lightning_mgwfbp.exchange.transport import Pending, Transport


class CompressedExchanger(FeedbackExchanger):
    """Averages what the ranks' compressors send.

    Args:
        transport: carries the messages.
        compressor: one with error feedback.
    """

    def __init__(self, transport: Transport, compressor: Compressor) -> None:
        super().__init__(transport)
        self.compressor = compressor
        self._feedback = ErrorFeedback(compressor.momentum_correction)
        self._dense = DenseExchanger(transport)
        self._step = 0
        self._clipping = 1.0
        self._density: float | None = None
        self._warn_of_no_effect()

    @property
    def needs_whole_gradient(self) -> bool:
        return self.compressor.local_clip_norm is not None

    def compresses(self, parameter: Tensor) -> bool:
        return parameter.numel() >= max(1, self.compressor.dense_below_numel)

    def adopt(
        self,
        buckets: Sequence[Bucket],
        pieces: Sequence[int] = (),
        gather_order: Sequence[int] = (),
    ) -> None:
        self.settle()
        self._feedback.adopt(buckets)

    def prepare(self, gradients: Iterable[Tensor]) -> None:
        """Clip the whole local gradient's norm to `local_clip_norm` * sqrt(1/P), before anything
        is accumulated (Deep Gradient Compression, section 3.2)."""
        limit = self.compressor.local_clip_norm
        assert limit is not None
        norms = [torch.linalg.vector_norm(g, dtype=accumulation_dtype(g.dtype)) for g in gradients]
        if norms:
            norm = float(torch.linalg.vector_norm(torch.stack(norms))) / self.loss_scale
            share = limit / math.sqrt(self.transport.world_size)
            self._clipping = share / norm if norm > share else 1.0

    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> Exchange:
        self.note_started(bucket)
        is_whole = density == 1.0  # the plan says so; a compressor's own need not mean that
        if density is None:
            density = self._scheduled_density()
        if is_whole or bucket.body_numel == 0 or self._saves_nothing(bucket.body_numel, density):
            return self._start_whole(bucket, key)
        return self._start_compressed(bucket, key, Moment(self._step, density))

    def conclude(self, others: Iterable[Tensor] = ()) -> None:
        super().conclude(others)
        self._step += 1
        self._clipping = 1.0
        self._density = None

    def discard(self) -> None:
        self._step -= self._is_right is not None
        super().discard()

    def forget(self, names: Collection[str]) -> None:
        self.settle()
        self._feedback.forget(names)

    def _commit(self) -> None:
        self._feedback.conclude(True)

    def _drop(self) -> None:
        self._feedback.conclude(False)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {"step": self._step, **self._feedback.state_dict()}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        self.settle()
        self._step = states[0].get("step", 0)  # of another method
        rests = [{k: v for k, v in state.items() if k != "step"} for state in states]
        self._feedback.load_state_dict(
            own_or_mean(rests, self.transport.rank, self.transport.world_size)
        )

    def _scheduled_density(self) -> float:
        """This step's; rank 0's where a function says it, lest message sizes differ."""
        if not self.compressor.asks_a_function:
            return self.compressor.density_at(self.epoch, self._step)
        if self._density is None:
            density = 0.0
            if self.transport.rank == 0:
                density = self.compressor.density_at(self.epoch, self._step)
            self._density = self.transport.broadcast_object(density, 0, key="density")
        return self._density

    def _saves_nothing(self, numel: int, density: float) -> bool:
        """Whether an all-reduce of `numel` float32 moves no more bytes than the wire form would."""
        dense = numel * torch.float32.itemsize
        wire = float(self.compressor.wire_nbytes(numel, torch.float32.itemsize, density))
        if self.compressor.collective == "all_reduce":
            return wire >= dense
        # a ring moves (P - 1) * wire for an all-gather, 2 * (P - 1) / P * dense for an all-reduce
        return wire >= 2 / self.transport.world_size * dense

    def _warn_of_no_effect(self) -> None:
        density, ranks = self.compressor.settled_density, self.transport.world_size
        asks_for_all = isinstance(self.compressor, Selection) and density == 1.0
        if self._saves_nothing(2**20, density) and not asks_for_all and self.transport.rank == 0:
            given = as_written(self.compressor)
            warnings.warn(
                f"`compressor={given}` has no effect on {ranks} ranks: its all-gather"
                " would move as many bytes as an all-reduce of everything, which is done instead."
                " Give PowerSGD() or 'bf16', or a lower density.",
                stacklevel=2,
            )

    def _start_whole(self, bucket: Bucket, key: str) -> Exchange:
        memory = self._feedback.of(bucket)
        if memory.is_empty:
            if self._clipping != 1.0:
                bucket.data.mul_(self._clipping)
        else:
            everything = memory.accumulate(self._clipping / self.loss_scale)
            torch.mul(everything, self.loss_scale, out=bucket.data)
            # zero but for what a narrow bucket rounds
            everything.sub_(bucket.data, alpha=1 / self.loss_scale)
            memory.settle(is_flushed=bucket.data.dtype == everything.dtype)
        return self._dense.start(bucket, key=key)

    def _start_compressed(self, bucket: Bucket, key: str, moment: Moment) -> Exchange:
        memory = self._feedback.of(bucket)
        accumulated = memory.accumulate(self._clipping / self.loss_scale)
        body, others = accumulated.tensor_split([bucket.body_numel])
        wire = self.compressor.encode(body, moment)
        parts = (torch.cat((others, bucket.tail)), *wire)
        self.compressor.leave_residual(body, wire, moment)
        others.zero_()
        if memory.next_velocity is not None:
            # momentum factor masking: what was sent must not go on as a velocity as well
            assert isinstance(self.compressor, Selection)
            self.compressor.mask(memory.next_velocity[: body.numel()], wire, moment)
        memory.settle()
        return self._send(bucket, parts, moment, key)

    def _send(
        self, bucket: Bucket, parts: tuple[Tensor, ...], moment: Moment, key: str
    ) -> Exchange:
        message = messages.join(parts)
        world_size = self.transport.world_size
        if self.compressor.collective == "all_reduce":
            numbers = message.view(parts[0].dtype).mul_(1.0 / world_size)
            pending = self.transport.all_reduce(numbers, key=key)
            received, weight = message.unsqueeze(0), self.loss_scale
        else:
            received = message.new_empty((world_size, message.numel()))
            pending = self.transport.all_gather(received, message, key=key)
            weight = self.loss_scale / world_size
        unpack = partial(self._unpack, bucket, received, parts, moment, weight)
        return _CompressedExchange(pending, unpack)

    def _unpack(
        self,
        bucket: Bucket,
        received: Tensor,
        like: tuple[Tensor, ...],
        moment: Moment,
        weight: float,
    ) -> None:
        """Fill the bucket with the sum of `weight` times every message, (messages, nbytes)."""
        narrow = bucket.buffer
        total = narrow.to(like[0].dtype).zero_()  # itself where it is as wide
        body, exact = total.tensor_split([bucket.body_numel])
        for message in received:
            others, *wire = messages.take_apart(message, like)
            self.compressor.decode(tuple(wire), body, moment, weight)
            exact.add_(others, alpha=weight)
        if total is not narrow:
            narrow.copy_(total)


class _CompressedExchange:
    def __init__(self, pending: Pending, unpack: Callable[[], None]) -> None:
        self._pending = pending
        self._unpack = unpack

    def finish(self) -> None:
        self._pending.wait()
        self._unpack()
