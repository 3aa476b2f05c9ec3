"""An all-reduce in its two halves, so that the second one need not follow the first at once.

A bucket's padded buffer is cut into equal pieces, (pieces, world_size, shard). A piece is
reduce-scattered, which leaves the sum of shard r on rank r, and later all-gathered in place.

[Note: halves] Each half is launched by a thread of its own, in one order on all ranks: reduce-
scatters by the caller, bucket by bucket; all-gathers by one that waits in the background (`Relay`).

[Note: pieces] A small piece is soon gone, and costs a start-up like a large one. Two emulated hosts
on two cores, 32 MiB (at 100 Mbit/s: 16) in pieces of one size; MB/s on the wire in each direction
(the link's own: 118 and 11.9) and, at 1 Gbit/s, milliseconds of CPU, median of 7 (3):

                        1 Gbit/s              100 Mbit/s
    piece       whole   r-s   a-g  both       both        CPU: whole  both
    64 KiB         92   115   115    38       11.8               186   443
    256 KiB       117   112   117   113       11.9                33    53
    512 KiB       119   118   115   113       11.7                31    39
    1 MiB         119   117   119   118       11.9                26    28
    2 MiB         119   118   116   118       12.0                25    30
    4 MiB         119   119   119   119       11.6                25    26
    8 MiB         118   118   118   117       12.0                24    25
    32 MiB (16)   118   111   119   112       12.0                24    24

("Whole" are all-reduces; in "both" an all-gather follows its reduce-scatter.)
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressors.cast import Cast
from lightning_mgwfbp.exchange.exchangers import Exchanger
from lightning_mgwfbp.exchange.relay import Relay
from lightning_mgwfbp.exchange.transport import Halves, Pending, Transport

_DEFAULT_PIECE_NBYTES = 2**20  # on the wire, where no plan says


class DecoupledExchanger(Exchanger):
    """Averages buckets by reduce-scatters and, in the background, all-gathers.

    Args:
        transport: joins the ranks.
        halves: carry buckets; closed with the exchanger.
        cast: the wire format, or None.
    """

    def __init__(self, transport: Transport, halves: Halves, cast: Cast | None = None) -> None:
        super().__init__(transport)
        self.share = 1.0 / transport.world_size
        self.halves = halves
        self._cast = cast
        self._buckets: list[Bucket] = []
        self._pieces: list[int] = []  # of each bucket
        self._gathers: list[tuple[int, int]] = []  # bucket and piece of each, in their order
        self._exchanges: list[DecoupledExchange] = []  # of this round, one for each bucket started
        self._relay: Relay | None = None
        self._error: BaseException | None = None

    def adopt(
        self,
        buckets: Sequence[Bucket],
        pieces: Sequence[int] = (),
        gather_order: Sequence[int] = (),
    ) -> None:
        self._stop()
        self._buckets = list(buckets)
        self._pieces = list(pieces) or [self._default_pieces(bucket) for bucket in buckets]
        # the gradients that backward makes last are those of what forward uses first
        backwards = range(len(buckets))[::-1]
        order = gather_order or [owner for owner in backwards for _ in range(self._pieces[owner])]
        pieces_of = [iter(range(count)) for count in self._pieces]
        self._gathers = [(owner, next(pieces_of[owner])) for owner in order]
        for bucket, count in zip(self._buckets, self._pieces, strict=True):
            bucket.pad(self.transport.world_size * count)
        self._exchanges = []
        self._error = None

    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> DecoupledExchange:
        if self.is_started:  # a new round
            assert all(exchange.finished for exchange in self._exchanges)
            self._exchanges.clear()
        number = len(self._exchanges)
        assert bucket is self._buckets[number], "buckets are started in order, once per round"
        bucket.scale_to(self.share)
        padded = bucket.padded
        wire = padded if self._cast is None else self._cast.narrowed(padded)
        pieces = wire.view(self._pieces[number], self.transport.world_size, -1)
        exchange = DecoupledExchange(self, bucket, pieces, key)
        self._exchanges.append(exchange)
        if self._error is not None:  # looked at after appending: `_fail` comes to all or to us
            raise self._error
        if self._relay is None:
            before = [0, *accumulate(self._pieces)]
            needed = [before[owner] + piece + 1 for owner, piece in self._gathers]
            self._relay = Relay(needed, self._launch_all_gather, self._fail, wire.device)
        for piece in range(len(pieces)):
            self._relay.put(exchange.reduce_scatter(piece))
        return exchange

    def close(self) -> None:
        self._stop()
        self.halves.close()

    @property
    def is_started(self) -> bool:
        """Whether all buckets of this round are on their way."""
        return len(self._exchanges) == len(self._buckets)

    def _launch_all_gather(self, turn: int) -> Pending:
        owner, piece = self._gathers[turn]
        return self._exchanges[owner].all_gather(piece)

    def _default_pieces(self, bucket: Bucket) -> int:
        dtype = bucket.buffer.dtype
        wire_dtype = dtype if self._cast is None else self._cast.wire_dtype(dtype)
        return math.ceil(bucket.buffer.numel() * wire_dtype.itemsize / _DEFAULT_PIECE_NBYTES)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for exchange in list(self._exchanges):
            exchange.fail(error)

    def _stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.stop()
            for exchange in self._exchanges:
                exchange.abandon()


class DecoupledExchange:
    """A bucket on its way, piece by piece.

    Args:
        owner: of which it is part.
        bucket: will hold the averages.
        pieces: on the wire, (pieces, world_size, shard).
        key: names the exchange.
    """

    def __init__(self, owner: DecoupledExchanger, bucket: Bucket, pieces: Tensor, key: str) -> None:
        self._owner = owner
        self._bucket = bucket
        self._pieces: Tensor | None = pieces  # let go of in the end: views keep the bucket's memory
        self._count = len(pieces)
        self._key = key
        self._gathers: list[Pending] = []
        self._ended = threading.Event()  # all launched, or none will be any more
        self._error: BaseException | None = None
        self.finished = False

    def finish(self) -> None:
        """Return once the bucket holds the averages.

        All buckets must have been started; they may be finished in any order.

        Raises:
            RuntimeError: some bucket has not been started.
            Exception: whatever ended the thread in the background.
        """
        if not self._ended.is_set() and not self._owner.is_started:
            raise RuntimeError(f"{self._key!r} comes after a bucket that has not been started")
        self._ended.wait()
        if self._error is not None:
            raise self._error
        for pending in self._gathers:
            pending.wait()
        if self._pieces is not None and self._pieces.dtype != self._bucket.padded.dtype:
            self._bucket.padded.copy_(self._pieces.view(-1))
        self._pieces, self._gathers = None, []
        self.finished = True

    def reduce_scatter(self, number: int) -> Pending:
        """Launch a piece's first half."""
        return self._owner.halves.reduce_scatter(self._piece(number), key=self._key_of(number))

    def all_gather(self, number: int) -> Pending:
        """Launch a piece's second half."""
        pending = _Shared(
            self._owner.halves.all_gather(self._piece(number), key=self._key_of(number))
        )
        self._gathers.append(pending)
        if len(self._gathers) == self._count:
            self._ended.set()  # and no view is held here any more, which would cost new memory
        return pending

    def fail(self, error: BaseException) -> None:
        """Have `finish` raise `error`, unless all is launched already."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def abandon(self) -> None:
        """Wait for what is on its way to others, and forget it."""
        for pending in self._gathers:
            with suppress(Exception):  # whoever stops in mid-exchange has an error already
                pending.wait()
        if not self.finished:
            self._error = RuntimeError("its exchanger was closed in the middle of a step")
            self._ended.set()
        self._pieces, self._gathers = None, []

    def _piece(self, number: int) -> Tensor:  # (world_size, shard)
        assert self._pieces is not None
        return self._pieces[number]

    def _key_of(self, number: int) -> str:
        return f"{self._key}, piece {number}"


class _Shared:
    """A message that several threads wait for: here the relay's, and that which finishes."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending
        self._lock = threading.Lock()

    def wait(self) -> None:
        with self._lock:
            if self._pending is not None:
                self._pending.wait()
                self._pending = None  # it keeps the bucket's memory
