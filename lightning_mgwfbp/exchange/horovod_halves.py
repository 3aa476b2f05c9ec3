"""Both halves of all-reduces over Horovod alone.

[Note: rates] Horovod does one thing at a time: two emulated hosts, 1 Gbit/s, 32 MiB in pieces of
one size, MB/s on the wire in each direction (the link's own: 118); "both" are all-gathers that
follow their reduce-scatters:

    piece           256 KiB    512 KiB    1 MiB    4 MiB
    all-reduces         105         94      111      109
    both halves          82         81       70       40

So where torch.distributed runs beside Horovod, CPUs' halves go over that (`DirectHalves`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from lightning_mgwfbp.exchange.scratch import Scratch
from lightning_mgwfbp.exchange.sum_of_rows import SumOfRows
from lightning_mgwfbp.exchange.transport import Pending

if TYPE_CHECKING:
    from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport


class HorovodHalves:
    """Both halves, which Horovod tells apart by their names, over `transport`."""

    def __init__(self, transport: HorovodTransport) -> None:
        self._transport = transport
        self._scratch = Scratch()

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        received, own = self._scratch.take(rows), self._transport.rank
        work = self._transport.all_to_all(received, rows, key=key)
        sources = list(received)
        sources[own] = rows[own]
        return SumOfRows(work, sources, own, received, self._scratch)

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        return self._transport.all_gather(rows, rows[self._transport.rank], key=key)

    def close(self) -> None:
        return
