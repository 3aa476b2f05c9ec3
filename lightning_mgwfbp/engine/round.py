"""`Round`: one exchange of all buckets, from the first launch to averages in `.grad`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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
        static_graph: the user's promise that buckets carry everything.

    Attributes:
        launched: how many buckets are on their way.
        has_more: whether this rank has something to exchange that no bucket carries; the last
            bucket tells the others.
        spoiled: how many buckets had been sent when a backward failed; what they bring is dropped.
        misfits: parameters that do not have the shape any more for which their bucket was made.
        late: this rank's gradients that no bucket has carried, by parameter; after `finish`.
    """

    def __init__(
        self,
        layout: Layout,
        ledger: GradientLedger,
        parameters: Sequence[nn.Parameter],
        exchanger: Exchanger,
        *,
        static_graph: bool = False,
    ) -> None:
        self._layout = layout
        self._ledger = ledger
        self._parameters = parameters
        self._exchanger = exchanger
        self._static_graph = static_graph
        self._rowwise = layout.rowwise
        self._rank = exchanger.transport.rank
        self._exchanges: list[Exchange] = []
        self._arrived: set[int] = set()
        self._finished: set[int] = set()
        self._sparse: dict[int, Tensor] = {}  # this rank's, of parameters known to be sparse
        self._sparse_somewhere: list[int] = []
        self.launched = 0
        self.has_more = False
        self.spoiled = 0
        self.misfits: Collection[int] = ()
        self.late: dict[int, Tensor] = {}

    @property
    def last(self) -> int:
        """Number of the last bucket."""
        return len(self._layout.buckets) - 1

    def spoil(self) -> None:
        """Take what was sent for part of a backward that has failed: whoever goes on has cleared
        what it left, or will."""
        self.spoiled = self.launched
        self.has_more |= self.spoiled > 0

    def launch_next(self, *, again: bool = False) -> None:
        """Pack the next bucket and send it.

        Args:
            again: see `Bucket.pack`; of the last bucket.

        Raises:
            RuntimeError: a bucket does not carry everything, against the promise.
        """
        bucket, is_last = self._layout.buckets[self.launched], self.launched == self.last
        gradients, used = self._take()
        if is_last:
            self._take_late()
            self._require_promised()
            self.has_more |= self._ledger.has_asides and not self._static_graph
        notice = is_last and self.has_more
        bucket.pack(gradients, used, notice, is_last and again, share=self._exchanger.share)
        del gradients  # their memory is free from here on
        with exchange_errors(self._rank, self._layout.descriptions[self.launched]):
            exchange = self._exchanger.start(
                bucket,
                key=f"bucket {self.launched}",
                density=self._layout.densities[self.launched],
            )
        self.launched += 1
        self._exchanges.append(exchange)

    def wait_for(self, number: int) -> None:
        """Return when one bucket holds the averages."""
        if number not in self._arrived:
            with exchange_errors(self._rank, self._layout.descriptions[number]):
                self._exchanges[number].finish()
            self._arrived.add(number)

    def finish_bucket(self, number: int) -> None:
        """Wait for one bucket and put its averages in place, but for those that are sparse."""
        if number in self._finished:
            return
        self.wait_for(number)
        self._finished.add(number)
        members, bucket = self._layout.members[number], self._layout.buckets[number]
        for i, average, somewhere in zip(members, bucket.gradients(), bucket.used(), strict=True):
            if number < self.spoiled:
                self._ledger.put(i, None)
            elif somewhere and i in self._rowwise:
                self._sparse_somewhere.append(i)
            elif i not in self.misfits:
                self._ledger.put(i, average if somewhere else None)

    def finish(self) -> list[Tensor]:
        """Wait for all buckets and put the averages in place; return those that are sparse."""
        for number in range(len(self._exchanges)):
            self.finish_bucket(number)
        sparse = {i: self._sparse.get(i) for i in self._sparse_somewhere}
        with exchange_errors(self._rank, "sparse gradients"):
            averages = average_sparse(self._exchanger.transport, self._parameters, sparse)
        for i, average in averages.items():
            self._ledger.put(i, average)
        return list(averages.values())

    def abandon(self) -> None:
        """Wait for what is on its way, and forget it."""
        for exchange in self._exchanges:
            with suppress(Exception):  # whoever closes in mid-exchange has an error already
                exchange.finish()
        self._exchanges.clear()

    def _take(self) -> tuple[list[Tensor | None], list[bool]]:
        """The next bucket's gradients, and which of them are new. What cannot be packed, being
        sparse where the ranks do not know it yet, or of another shape, is kept for later."""
        gradients: list[Tensor | None] = []
        used: list[bool] = []
        for i in self._layout.members[self.launched]:
            gradient, new = self._ledger.take(i)
            if gradient is not None and i in self._rowwise:
                self._sparse[i], gradient = gradient, None
            elif gradient is not None and (gradient.is_sparse or i in self.misfits):
                self.keep_late(i, gradient)
                gradient, new = None, False
            gradients.append(gradient)
            used.append(new)
        return gradients, used

    def _take_late(self) -> None:
        for members in self._layout.members:
            for i in members:
                late = self._ledger.take_late(i)
                if late is not None:
                    self.keep_late(i, late)

    def _require_promised(self) -> None:
        if self.has_more and self._static_graph:
            raise RuntimeError(
                "`static_graph=True` promises that every backward uses the same parameters equally"
                " often, but one came after its merge group had been sent, was replaced, frozen or"
                " unfrozen since, or has a sparse gradient. Leave static_graph out."
            )

    def keep_late(self, i: int, part: Tensor) -> None:
        """Have the ranks exchange `part` of parameter `i` beside the buckets."""
        self.has_more = True
        if i not in self.late:
            self.late[i] = part
        else:  # in this order, since nothing strided can be added to a sparse tensor
            other = self.late[i]
            self.late[i] = part + other if other.is_sparse else other + part
