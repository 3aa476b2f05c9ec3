"""Bucket in, averaged bucket out, asynchronously. The only place that divides by world_size.

The factor 1/P is applied before the sum, as DistributedDataParallel does: two ranks then get its
bits, and a narrow wire format cannot overflow in the sum.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressors import Compressor
from lightning_mgwfbp.exchange.transport import Pending, Transport


class Exchange(Protocol):
    """A bucket on its way."""

    def finish(self) -> None:
        """Return once the bucket holds the averages."""


class DenseExchanger:
    """All-reduces every element, in the bucket's own dtype or in a compressor's.

    Args:
        transport: carries the messages.
        compressor: a wire format in which sums can be made, or None.
    """

    def __init__(self, transport: Transport, compressor: Compressor | None = None) -> None:
        self.transport = transport
        self.compressor = compressor

    def start(self, bucket: Bucket, *, key: str) -> Exchange:
        """Start to replace the content of `bucket` by its mean over the ranks."""
        bucket.buffer.mul_(1.0 / self.transport.world_size)
        wire = bucket.buffer if self.compressor is None else self.compressor.encode(bucket.buffer)
        return _DenseExchange(self, bucket, wire, self.transport.all_reduce(wire, key=key))


class _DenseExchange:
    def __init__(
        self, exchanger: DenseExchanger, bucket: Bucket, wire: Tensor, pending: Pending
    ) -> None:
        self._exchanger = exchanger
        self._bucket = bucket
        self._wire = wire
        self._pending = pending

    def finish(self) -> None:
        self._pending.wait()
        if self._exchanger.compressor is not None:
            self._exchanger.compressor.decode(self._wire, self._bucket.buffer)
