"""Averages gradients over the ranks, merge group by merge group, while backward still runs.

Knows *when*: which gradients are ready, what may be launched, what must be waited for. Buckets
know how gradients lie in memory, exchangers how they travel.

[Note: order] Buckets are launched strictly in plan order, whatever order autograd ends in, so that
all ranks issue the same sequence of collectives.

[Note: the last bucket] It is held back until backward has ended. Its last gradient is the last one
of backward anyway, and so its tail can tell the other ranks, without a message of its own, that
this rank has gradients which no bucket carried: see `_amend`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.layout import Layout, adapted_plan, provisional_plan, split_by_storage
from lightning_mgwfbp.engine.ledger import GradientLedger
from lightning_mgwfbp.engine.membership import Membership
from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchange
from lightning_mgwfbp.plan import MergePlan


class Reducer:
    """Exchanges what each rank has accumulated in `.grad` since its last exchange.

    Until a plan is installed gradients are exchanged after backward has ended, so that nothing
    disturbs a measurement of backward.

    Args:
        named_parameters: all parameters of the model, trainable or not, the same on all ranks.
        exchanger: averages buckets.
        static_graph: the caller's promise that every backward uses the same parameters equally
            often on all ranks; spares a look at the last bucket's tail (on GPUs: a wait).

    Attributes:
        exchanges: how many there have been.
        structure_version: how often parameters have joined or left.

    Raises:
        ValueError: no parameter is trainable.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        exchanger: DenseExchanger,
        *,
        static_graph: bool = False,
    ) -> None:
        named = dict(named_parameters)
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._exchanger = exchanger
        self._transport = exchanger.transport
        self._static_graph = static_graph
        trainable = {name for name, p in named.items() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "The model has no trainable parameter (requires_grad=True): nothing to exchange."
                " Unfreeze a parameter, or train on one device without this strategy."
            )
        count = len(named)
        self._fired = [0] * count  # since backward began
        self._expected = [0] * count  # the most often a parameter fired in one backward
        self._syncing = True
        self._overlap = False
        self.exchanges = 0
        self.structure_version = 0
        self._ledger = GradientLedger(self._names, self._parameters)
        self._membership = Membership(self._parameters, self._on_gradient)
        self._lay_out(provisional_plan(self._names, self._parameters, trainable))
        self._reset()

    @property
    def plan(self) -> MergePlan:
        """The plan in force."""
        return self._layout.plan

    @property
    def syncing(self) -> bool:
        """False within `no_sync`."""
        return self._syncing

    @property
    def unsynchronized(self) -> bool:
        """Whether a backward has left gradients on this rank that were not exchanged."""
        return self._running or any(self._ledger.is_new)

    @property
    def exposed_seconds(self) -> float | None:
        """Mean time per exchange, under the present plan, that was spent waiting for it."""
        return self._waited_seconds / self._waits if self._waits else None

    def install(self, plan: MergePlan) -> None:
        """Exchange by `plan` from the next backward on, overlapped with it.

        Raises:
            ValueError: the plan was made for other parameters.
        """
        assert not self._running, "a plan is installed between a step and the next backward"
        plan.check_names(self.plan.names)
        self._lay_out(plan)
        self._overlap = True

    def hold(self) -> None:
        """Exchange after backward from now on, until the next `install`; learn anew how often
        parameters fire, lest one unusual backward hold their groups back for ever."""
        self._overlap = False
        self._expected = [0] * len(self._names)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward only accumulates; the next one outside exchanges all of it."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @torch.no_grad()
    def synchronize(self) -> None:
        """Launch what backward left incomplete, wait for all, and put the averages in `.grad`.

        Collective: every rank must call it, whether or not any gradient exists there. Does
        nothing under `no_sync`.

        Raises:
            RuntimeError: an exchange failed; names the merge group.
        """
        if not self._syncing:
            return
        begin = time.perf_counter()
        notice = self._has_more_than_buckets_carry()
        if notice and self._static_graph:
            raise RuntimeError(
                "`static_graph=True` promises that every backward uses the same parameters equally"
                " often, but one came after its merge group had been sent, or was frozen or"
                " unfrozen since. Leave static_graph out."
            )
        last = len(self._layout.buckets) - 1
        while self._launched < last:
            self._launch(self._launched)
        self._launch(last, notice)
        late: dict[int, Tensor] = {}
        for number in range(last + 1):
            late.update(self._finish(number))
        if not self._static_graph and self._layout.buckets[last].noticed():
            self._amend(late)
        self._reset()
        self.exchanges += 1
        self._waits += 1
        self._waited_seconds += time.perf_counter() - begin

    def close(self) -> None:
        """Remove all hooks, and wait for what is still on its way."""
        self._membership.close()
        for exchange in self._exchanges:
            with suppress(RuntimeError):  # whoever closes in mid-exchange has an error already
                exchange.finish()
        self._exchanges.clear()

    def _lay_out(self, plan: MergePlan) -> None:
        self._layout = Layout(plan, self._names, self._parameters)
        self._membership.adopt(self._layout)
        self._waits = 0
        self._waited_seconds = 0.0

    def _reset(self) -> None:
        self._expected = list(map(max, self._expected, self._fired))
        self._fired = [0] * len(self._names)
        self._exchanges: list[Exchange] = []
        self._launched = 0
        self._running = False
        self._late = False

    def _on_gradient(self, i: int, _: Tensor) -> None:
        self._ledger.is_new[i] = True
        bucket = self._layout.bucket_of[i]
        if bucket < self._launched:
            self._late = True  # under no_sync too: the exchange is on its way
        if not self._syncing:
            return
        if not self._running:
            self._begin()
        self._fired[i] += 1
        if bucket >= self._launched and self._fired[i] == self._expected[i]:
            self._waiting[bucket] -= 1
            if not self._waiting[bucket] and self._overlap:
                self._launch_ready()

    def _begin(self) -> None:
        self._running = True
        self._waiting = [
            sum(1 for i in part if self._expected[i] and self._parameters[i].requires_grad)
            for part in self._layout.members
        ]

    @torch.no_grad()
    def _launch_ready(self) -> None:
        last = len(self._layout.buckets) - 1  # [Note: the last bucket]
        while self._launched < last and not self._waiting[self._launched]:
            self._launch(self._launched)

    def _launch(self, number: int, notice: bool = False) -> None:
        bucket = self._layout.buckets[number]
        members = self._layout.members[number]
        gradients = [self._ledger.take(i) for i in members]
        bucket.pack(gradients, [self._ledger.is_new[i] for i in members], notice)
        del gradients  # their memory is free from here on
        self._launched = number + 1
        with exchange_errors(self._transport.rank, self._layout.descriptions[number]):
            exchange = self._exchanger.start(bucket, key=f"bucket {number}")
        self._exchanges.append(exchange)

    def _finish(self, number: int) -> dict[int, Tensor]:
        """Put the averages of one bucket in place; return the late parts by parameter."""
        with exchange_errors(self._transport.rank, self._layout.descriptions[number]):
            self._exchanges[number].finish()
        members, bucket = self._layout.members[number], self._layout.buckets[number]
        late = {}
        for i, average, somewhere in zip(members, bucket.gradients(), bucket.used(), strict=True):
            part = self._ledger.put(i, average if somewhere else None)
            if part is not None:
                late[i] = part
        return late

    def _has_more_than_buckets_carry(self) -> bool:
        for i in self._membership.hook_unfrozen():
            # what it has accumulated came unseen
            if self._parameters[i].grad is not None:
                self._ledger.is_new[i] = True
                self._late |= self._layout.bucket_of[i] < self._launched
        return self._membership.changed() or self._late

    def _amend(self, late: dict[int, Tensor]) -> None:
        """Exchange what no bucket carried on some rank, and adapt the plan to who takes part.

        Args:
            late: this rank's late parts by parameter.
        """
        joining = self._membership.joining()
        for i in joining:
            self._ledger.is_new[i] = True  # its hooks were not there to say so
            part = self._ledger.take(i)
            if part is not None:
                late[i] = part
        members = self._membership.staying() + joining
        everyone = self._transport.all_gather_object((sorted(late), members), key="amendment")
        parts = sorted({i for theirs, _ in everyone for i in theirs})
        for indices in split_by_storage(parts, self._parameters):
            bucket = Bucket([self._parameters[i] for i in indices])
            bucket.pack([late.get(i) for i in indices], [i in late for i in indices])
            with exchange_errors(self._transport.rank, "gradients outside the plan"):
                self._exchanger.start(bucket, key="amendment").finish()
            for i, average in zip(indices, bucket.gradients(), strict=True):
                self._ledger.add(i, average)
        planned = {self._names[i] for _, theirs in everyone for i in theirs}
        if planned != set(self.plan.names):
            self._lay_out(adapted_plan(self.plan, self._names, self._parameters, planned))
            self.structure_version += 1
