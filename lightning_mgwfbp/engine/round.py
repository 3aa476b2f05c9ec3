"""`Round`: one exchange of all buckets, from the first launch to averages in `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor, nn

from lightning_mgwfbp.engine.amendment import average_sparse
from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.layout import Layout
from lightning_mgwfbp.engine.ledger import GradientLedger
from lightning_mgwfbp.exchange.exchangers import Exchange, Exchanger


class Round:
    """Launches buckets strictly in plan order, and finishes them.

    Args:
        layout: whose buckets are exchanged.
        ledger: gives gradients and takes averages.
        parameters: of the whole model, (N,).
        exchanger: averages buckets.

    Attributes:
        launched: how many buckets are on their way.
        late: this rank's gradients that no bucket has carried, by parameter; after `finish`.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: GradientLedger,
        parameters: Sequence[nn.Parameter],
        exchanger: Exchanger,
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._parameters = parameters
        self._exchanger = exchanger
        self._rowwise = layout.rowwise
        self._rank = exchanger.transport.rank
        self._exchanges: list[Exchange] = []
        self._finished: set[int] = set()
        self._sparse: dict[int, Tensor] = {}  # this rank's
        self._sparse_somewhere: list[int] = []
        self._taken: tuple[list[Tensor | None], list[bool]] | None = None
        self.launched = 0
        self.late: dict[int, Tensor] = {}

    @property
    def last(self) -> int:
        """Number of the last bucket."""
        return len(self._layout.buckets) - 1

    def take(self) -> bool:
        """Take the next bucket's gradients; return whether one of them cannot be packed, being
        sparse where the ranks do not know it yet."""
        members = self._layout.members[self.launched]
        gradients = [self._ledger.take(i) for i in members]
        used = [self._ledger.is_new[i] for i in members]
        surprise = False
        for place, i in enumerate(members):
            gradient = gradients[place]
            if gradient is not None and (gradient.is_sparse or i in self._rowwise):
                self._sparse[i], gradients[place] = gradient, None
                if i not in self._rowwise:
                    used[place] = False
                    surprise = True
        self._taken = gradients, used
        return surprise

    def launch(self, notice: bool = False, again: bool = False) -> None:
        """Send what was taken.

        Args:
            notice, again: see `Bucket.pack`.
        """
        assert self._taken is not None
        bucket = self._layout.buckets[self.launched]
        bucket.pack(*self._taken, notice, again, share=self._exchanger.share)
        self._taken = None  # the gradients' memory is free from here on
        with exchange_errors(self._rank, self._layout.descriptions[self.launched]):
            exchange = self._exchanger.start(
                bucket,
                key=f"bucket {self.launched}",
                density=self._layout.densities[self.launched],
            )
        self.launched += 1
        self._exchanges.append(exchange)

    def finish_bucket(self, number: int) -> None:
        """Wait for one bucket and put its averages in place, but for those that are sparse."""
        if number in self._finished:
            return
        with exchange_errors(self._rank, self._layout.descriptions[number]):
            self._exchanges[number].finish()
        self._finished.add(number)
        members, bucket = self._layout.members[number], self._layout.buckets[number]
        for i, average, somewhere in zip(members, bucket.gradients(), bucket.used(), strict=True):
            if somewhere and i in self._rowwise:
                self._sparse_somewhere.append(i)
            else:
                self._put(i, average if somewhere else None)

    def finish(self) -> list[Tensor]:
        """Wait for all buckets and put the averages in place; return those that are sparse."""
        for number in range(len(self._exchanges)):
            self.finish_bucket(number)
        sparse = {i: self._sparse.get(i) for i in self._sparse_somewhere}
        with exchange_errors(self._rank, "sparse gradients"):
            averages = average_sparse(self._exchanger.transport, self._parameters, sparse)
        for i, average in averages.items():
            self._put(i, average)
        return list(averages.values())

    def abandon(self) -> None:
        """Wait for what is on its way, and forget it."""
        for exchange in self._exchanges:
            with suppress(Exception):  # whoever closes in mid-exchange has an error already
                exchange.finish()
        self._exchanges.clear()

    def _put(self, i: int, average: Tensor | None) -> None:
        came_late = self._ledger.put(i, average)
        not_packed = None if i in self._rowwise else self._sparse.get(i)
        # in this order, since nothing strided can be added to a sparse tensor
        parts = [part for part in (came_late, not_packed) if part is not None]
        if parts:
            self.late[i] = parts[0] if len(parts) == 1 else parts[0] + parts[1]
