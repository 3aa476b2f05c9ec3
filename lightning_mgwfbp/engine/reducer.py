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

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.amendment import Amendment, amend
from lightning_mgwfbp.engine.divergence import DivergenceWatch
from lightning_mgwfbp.engine.exposed_time import ExposedTime
from lightning_mgwfbp.engine.layout import Layout, adapted_plan, provisional_plan
from lightning_mgwfbp.engine.ledger import GradientLedger
from lightning_mgwfbp.engine.membership import Membership
from lightning_mgwfbp.engine.readiness import Readiness
from lightning_mgwfbp.engine.round import Round
from lightning_mgwfbp.exchange.exchangers import Exchanger
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
        watch: compares the ranks' weights.

    Attributes:
        exchanger: the one given.
        layout: the buckets of the plan in force.
        exchanges: how many there have been.
        steps: how many an optimizer has taken, each after an exchange.
        structure_version: how often parameters have joined or left.

    Raises:
        ValueError: no parameter is trainable.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        exchanger: Exchanger,
        *,
        static_graph: bool = False,
        watch: DivergenceWatch | None = None,
    ) -> None:
        named = dict(named_parameters)
        self._names, self._parameters = tuple(named), tuple(named.values())
        self.exchanger = exchanger
        self._transport = exchanger.transport
        self._static_graph = static_graph
        self._watch = watch
        trainable = {name for name, p in named.items() if p.requires_grad}
        if not trainable:
            raise ValueError(
                "The model has no trainable parameter (requires_grad=True): nothing to exchange."
                " Unfreeze a parameter, or train on one device without this strategy."
            )
        self._readiness = Readiness(len(named))
        self._syncing = True
        self._overlap = False
        self._has_launched = False  # an exchange, since the optimizer's last step
        self.exchanges = 0
        self.steps = 0
        self.structure_version = 0
        self._ledger = GradientLedger(self._parameters, sets_aside=exchanger.keeps_residuals)
        self._membership = Membership(
            self._parameters,
            self._on_gradient,
            self._ledger.set_aside if exchanger.keeps_residuals else None,
        )
        self._lay_out(provisional_plan(self._names, self._parameters, trainable), rowwise=())

    @property
    def plan(self) -> MergePlan:
        """The plan in force."""
        return self.layout.plan

    @property
    def rowwise(self) -> list[str]:
        """Names of the parameters whose gradients are known to be sparse."""
        return [self._names[i] for i in sorted(self.layout.rowwise)]

    @property
    def overlaps(self) -> bool:
        """Whether there is a plan by which exchanges begin during backward."""
        return self._overlap

    @property
    def syncing(self) -> bool:
        """False within `no_sync`."""
        return self._syncing

    @property
    def unsynchronized(self) -> bool:
        """Whether a backward has left gradients on this rank that were not exchanged."""
        return self._running or any(self._ledger.is_new) or self._membership.has_unseen()

    @property
    def weight(self) -> float:
        """Of what this rank has in the average: 1 but where not all ranks contribute."""
        return self._ledger.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._ledger.weight = weight

    @property
    def exposed_seconds(self) -> float | None:
        """Mean time per exchange, under the present plan, that was spent waiting for it."""
        return self._exposed.mean_seconds

    def install(self, plan: MergePlan) -> None:
        """Exchange by `plan` from the next backward on, overlapped with it.

        Raises:
            ValueError: the plan was made for other parameters.
        """
        assert not self._running, "a plan is installed between a step and the next backward"
        plan.check_names(self.plan.names)
        self._lay_out(plan, self.layout.rowwise)
        self._overlap = not self.exchanger.needs_whole_gradient

    def expect_rowwise(self, names: Collection[str]) -> None:
        """Take the gradients of these parameters for sparse ones from the beginning."""
        rowwise = [i for i, name in enumerate(self._names) if name in names]
        self._lay_out(self.plan, rowwise)

    def hold(self) -> None:
        """Exchange after backward from now on, until the next `install`; learn anew how often
        parameters fire."""
        self._overlap = False
        self._readiness.forget()

    def stepped(self) -> None:
        """Take note that an optimizer has stepped, so that ranks out of step are seen."""
        self.steps += self._has_launched
        self._has_launched = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward only accumulates; the next one outside exchanges all of it."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def synchronize(self) -> None:
        """Launch what backward left incomplete, wait for all, and put the averages in `.grad`.

        Collective: every rank must call it, whether or not any gradient exists there. Does
        nothing under `no_sync`.

        Raises:
            RuntimeError: an exchange failed; names the merge group. Or the ranks are out of step,
                or their weights differ.
        """
        if not self._syncing:
            return
        self.launch()
        self.complete()
        self.compare_weights()

    def compare_weights(self) -> None:
        """Say how weights differ, if a completed exchange has shown that they do. Collective then.

        Raises:
            RuntimeError: by more than rounding, or at all, as `DivergenceWatch` was told.
        """
        if self._watch is not None:
            self._watch.compare(self.steps)

    @torch.no_grad()
    def launch(self) -> None:
        """Launch what backward left incomplete: the first half of `synchronize`."""
        with self._exposed.counted():
            self._look_for_what_came_unseen()
            if self.exchanger.needs_whole_gradient:
                self.exchanger.prepare(self._new_gradients())
            while self._round.launched <= self._round.last:
                self._launch_next()
        if self._watch is not None:
            self._watch.start(self.exchanges)

    @torch.no_grad()
    def finish_bucket(self, number: int) -> None:
        """Wait for one of the launched buckets, and put its averages in `.grad`."""
        with self._exposed.counted():
            self._round.finish_bucket(number)

    def is_noticed(self) -> bool:
        """Whether some rank has gradients that no bucket carried; waits for the last bucket."""
        last = self._round.last
        self.finish_bucket(last)
        if self._static_graph:
            return False
        noticed = self.layout.buckets[last].noticed()
        if noticed is None:
            raise RuntimeError(
                "The ranks are out of step: some exchange gradients for the first time since the"
                " optimizer's last step, others once more, as after a backward() that not all"
                " ranks have called. Every rank must call backward, synchronize and step alike."
            )
        return noticed

    @torch.no_grad()
    def complete(self) -> None:
        """Wait for all that was launched: the second half of `synchronize`."""
        noticed = self.is_noticed()
        with self._exposed.counted():
            others = self._round.finish()
            amendment = self._amend(self._round.late) if noticed else None
            if amendment is not None:
                others += amendment.averages.values()
            self.exchanger.conclude(others)
        self._exposed.exchange_ended()  # under the plan that was in force
        if amendment is not None:
            self._adapt(amendment)
        self._reset()
        self.exchanges += 1
        if self._watch is not None:
            self._watch.finish()

    def close(self) -> None:
        """Remove all hooks, and wait for what is still on its way."""
        self._membership.close()
        self._round.abandon()
        self.exchanger.close()

    def _lay_out(self, plan: MergePlan, rowwise: Collection[int]) -> None:
        self.layout = Layout(
            plan, self._names, self._parameters, self.exchanger.compresses, rowwise
        )
        self._membership.adopt(self.layout)
        self.exchanger.adopt(self.layout.buckets, self.layout.pieces, self.layout.gather_order)
        self._exposed = ExposedTime()
        self._reset()

    def _reset(self) -> None:
        self._readiness.end()
        self._round = Round(self.layout, self._ledger, self._parameters, self.exchanger)
        self._running = False
        self._has_more = False  # than the buckets carry

    def _on_gradient(self, i: int, _: Tensor) -> None:
        self._ledger.is_new[i] = True
        bucket = self.layout.bucket_of[i]
        if bucket < self._round.launched:
            self._has_more = True  # under no_sync too: the exchange is on its way
        if not self._syncing:
            return
        if not self._running:
            self._begin()
        if self._readiness.fire(i, bucket) and self._overlap:
            self._launch_ready()

    def _begin(self) -> None:
        self._running = True
        self._readiness.begin(
            [
                [i for i in members if self._parameters[i].requires_grad]
                for members in self.layout.members
            ]
        )

    @torch.no_grad()
    def _launch_ready(self) -> None:
        round_ = self._round
        while round_.launched < round_.last and self._readiness.is_complete(round_.launched):
            self._launch_next()

    def _launch_next(self) -> None:
        self._has_more |= self._round.take()
        is_last = self._round.launched == self._round.last  # [Note: the last bucket]
        if is_last and self._has_more and self._static_graph:
            raise RuntimeError(
                "`static_graph=True` promises that every backward uses the same parameters equally"
                " often, but one came after its merge group had been sent, was frozen or unfrozen"
                " since, or has a sparse gradient. Leave static_graph out."
            )
        again = is_last and self._has_launched
        self._has_launched |= is_last
        self._round.launch(notice=is_last and self._has_more, again=again)

    def _look_for_what_came_unseen(self) -> None:
        for i in self._membership.hook_unfrozen():
            if self._parameters[i].grad is not None:
                self._ledger.is_new[i] = True
                self._has_more |= self.layout.bucket_of[i] < self._round.launched
        self._has_more |= self._membership.changed()

    def _new_gradients(self) -> list[Tensor]:
        gradients = [
            p.grad for p, new in zip(self._parameters, self._ledger.is_new, strict=True) if new
        ]
        return [g for g in gradients if g is not None and not g.is_sparse]

    def _amend(self, late: dict[int, Tensor]) -> Amendment:
        """Exchange what no bucket carried on some rank, this rank's `late` parts among it."""
        joining = self._membership.joining()
        for i in joining:
            self._ledger.is_new[i] = True  # its hooks were not there to say so
            part = self._ledger.take(i)
            if part is not None:
                late[i] = part
        members = self._membership.staying() + joining
        amendment = amend(self._transport, self._parameters, late, members, self.layout.rowwise)
        for i, average in amendment.averages.items():
            self._ledger.add(i, average)
        return amendment

    def _adapt(self, amendment: Amendment) -> None:
        planned = {self._names[i] for i in amendment.members}
        joined_or_left = planned != set(self.plan.names)
        self.structure_version += joined_or_left
        if joined_or_left or amendment.rowwise != self.layout.rowwise:
            plan = adapted_plan(self.plan, self._names, self._parameters, planned)
            self._lay_out(plan, amendment.rowwise)
