"""Averages gradients over the ranks, merge group by merge group, while backward still runs.

Knows *when*: which gradients are ready, what may be launched, what must be waited for. Buckets
know how gradients lie in memory, exchangers how they travel.

[Note: own backward] Users call backward for purposes of their own: an attack on the input, a Fisher
estimate, a picture, on one rank only perhaps. So gradients are counted and buckets launched
within training's own backward alone (`armed`); any other one leaves its gradients in `.grad`, as
plain PyTorch does. What lies there when the exchange comes is part of it. The flag is the
reducer's, not a thread's: autograd calls hooks in a thread for each device, which is why there is a
lock, too.

[Note: order] Buckets are launched strictly in plan order, whatever order autograd ends in, so that
all ranks issue the same sequence of collectives.

[Note: the last bucket] It is held back until backward has ended. Its last gradient is the last one
of backward anyway, and so its tail can tell the other ranks, without a message of its own, that
this rank has gradients which no bucket carried: see `_amend`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

from lightning_mgwfbp.engine.amendment import Amendment, Beside, amend
from lightning_mgwfbp.engine.divergence import DivergenceWatch
from lightning_mgwfbp.engine.exchanged_parameters import ExchangedParameters
from lightning_mgwfbp.engine.exposed_time import ExposedTime
from lightning_mgwfbp.engine.layout import Layout
from lightning_mgwfbp.engine.round import Round
from lightning_mgwfbp.engine.structure import Structure
from lightning_mgwfbp.exchange.exchangers import Exchanger
from lightning_mgwfbp.plan import MergePlan


class Reducer:
    """Exchanges what each rank has in `.grad`.

    Until a plan is installed gradients are exchanged after backward has ended, so that nothing
    disturbs a measurement of backward.

    Args:
        structure: all parameters of the model, trainable or not, the same on all ranks, and the
            optimizers that step them.
        exchanger: averages buckets.
        static_graph: the caller's promise that every backward uses the same parameters equally
            often on all ranks; spares a look at the last bucket's tail (on GPUs: a wait).
        watch: compares the ranks' weights.
        is_always_armed: every backward outside of `no_sync` is training's own.

    Attributes:
        is_always_armed: as it was given; it may be changed.
        exchanger: the one given.
        known: the parameters, and what is kept of each.
        exchanges: how many there have been.
        steps: how many an optimizer has taken, each after an exchange.
        on_ready: told the name of each parameter whose gradient training's own backward has made.

    Raises:
        ValueError: no parameter is trainable.
    """

    def __init__(
        self,
        structure: Structure,
        exchanger: Exchanger,
        *,
        static_graph: bool = False,
        watch: DivergenceWatch | None = None,
        is_always_armed: bool = True,
    ) -> None:
        self._structure = structure
        self.exchanger = exchanger
        self._static_graph = static_graph
        self._watch = watch
        self.is_always_armed = is_always_armed
        self._is_armed = False
        self._lock = threading.RLock()
        self._syncing = True
        self._overlap = False
        self._has_launched = False  # an exchange, since the optimizer's last step
        self.exchanges = 0
        self.steps = 0
        self.on_ready: Callable[[str], None] | None = None
        self._exposed = ExposedTime()  # under the present plan
        self.known = ExchangedParameters(structure, exchanger, self._on_gradient)
        self._begin_anew()

    @property
    def layout(self) -> Layout:
        """The buckets of the plan in force."""
        return self.known.layout

    @property
    def plan(self) -> MergePlan:
        """The plan in force."""
        return self.layout.plan

    @property
    def overlaps(self) -> bool:
        """Whether there is a plan by which exchanges begin during backward."""
        return self._overlap

    @property
    def syncing(self) -> bool:
        """False within `no_sync`."""
        return self._syncing

    @property
    def has_begun(self) -> bool:
        """Whether training's own backward has left gradients that all ranks exchange."""
        is_own = self._is_armed or self.is_always_armed
        return self._running or (is_own and self._is_any_new(self.known.membership.unseen()))

    @property
    def unsynchronized(self) -> bool:
        """Whether a backward has left gradients on this rank that were not exchanged."""
        there = [i for i, left in self._left.items() if left() is self.known.parameters[i].grad]
        return self._running or self._is_any_new([*there, *self.known.membership.unseen()])

    @property
    def weight(self) -> float:
        """Of what this rank has in the average: 1 but where not all ranks contribute."""
        return self.known.ledger.weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self.known.ledger.weight = weight

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
        self._lay_out(plan, self.known.rowwise)
        self._overlap = not self.exchanger.needs_whole_gradient

    def expect_rowwise(self, names: Collection[str]) -> None:
        """Take the gradients of these parameters for sparse ones from the beginning."""
        self._lay_out(self.plan, names)

    def hold(self) -> None:
        """Exchange after backward from now on, until the next `install`; learn anew how often
        parameters fire."""
        self._overlap = False
        self.known.readiness.forget()

    def stepped(self) -> None:
        """Take note that an optimizer has stepped, so that ranks out of step are seen."""
        self.steps += self._has_launched
        self._has_launched = False
        self.exchanger.settle()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backward only accumulates; the next one outside exchanges all of it."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def arm(self) -> None:
        """Take the next backward for training's own, and all until the exchange is complete."""
        self._is_armed = True

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Around training's own backward: [Note: own backward]."""
        if self._syncing:
            self.known.ledger.set_averages_aside()
        self._is_armed = True
        try:
            yield
        except BaseException:
            self.known.ledger.put_back()
            self._round.spoil()
            self.known.readiness.begin_again(self.known.expected())
            self._followed.clear()
            raise
        finally:
            self._is_armed = False

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
        with self._exposed.counted(), self._lock:
            if not self._running:
                self._begin()
            self._count(self._followed)
            self.known.membership.hook_unfrozen()
            self._round.has_more |= self.known.membership.changed()
            self._take_what_no_bucket_has()
            if self.exchanger.needs_whole_gradient:
                self.exchanger.prepare(self.known.new_gradients())
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
        with self._exposed.counted():
            self._round.wait_for(last)
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
            amendment = self._amend() if noticed else None
            self.known.add_back(None if amendment is None else amendment.kept)
            if amendment is not None:
                others += amendment.averages.values()
            self.exchanger.conclude(others)
        self._exposed.exchange_ended()  # under the plan that was in force
        if amendment is not None:
            if self.known.adapt(amendment):
                self._exposed = ExposedTime()
            self.known.put_late(amendment.averages)
        self._begin_anew()
        self.exchanges += 1
        if self._watch is not None:
            self._watch.finish()

    def discard(self) -> None:
        """Undo what the exchanges since the last step have left behind: their averages are not
        wanted. The averages themselves stay in `.grad`."""
        self.exchanger.discard()

    def close(self) -> None:
        """Remove all hooks, and wait for what is still on its way."""
        self.known.membership.close()
        self._round.abandon()
        if self._watch is not None:
            with suppress(Exception):  # whoever closes in mid-exchange has an error already
                self._watch.finish()
        self.exchanger.close()

    def _lay_out(self, plan: MergePlan, rowwise: Collection[str]) -> None:
        self.known.lay_out(plan, rowwise)
        self._exposed = ExposedTime()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Be ready for the next exchange."""
        known = self.known
        known.readiness.end()
        self._round = Round(
            known.layout,
            known.ledger,
            known.parameters,
            self.exchanger,
            static_graph=self._static_graph,
        )
        self._followed: list[int] = []  # parameters that others' hooks had still to see
        self._running = False  # an exchange
        # what backwards have left in `.grad` since the last exchange that are not training's own
        self._left: dict[int, weakref.ref[Tensor]] = {}
        self._is_armed = False
        self._has_changed = False  # the structure
        self._from_newcomers: dict[str, Tensor] = {}  # gradients, by name

    def _is_any_new(self, parameters: Iterable[int]) -> bool:
        return any(map(self.known.ledger.is_new, parameters))

    def _on_gradient(self, i: int, _: Tensor) -> None:
        with self._lock:
            if not self._syncing or not (self._is_armed or self.is_always_armed):
                self._note_left(i)
                return
            if not self._running:
                self._begin()
            if self.on_ready is not None:
                self.on_ready(self.known.names[i])
            ready, self._followed = self._followed, []
            (self._followed if self.known.membership.is_followed(i) else ready).append(i)
            if self._count(ready) and self._overlap:
                self._launch_ready()

    def _note_left(self, i: int) -> None:
        gradient = self.known.parameters[i].grad
        if gradient is not None:
            self._left[i] = weakref.ref(gradient)

    def _count(self, parameters: Iterable[int]) -> bool:
        """Count gradients; return whether one of them completes its bucket."""
        bucket_of = self.layout.bucket_of
        completed = [self.known.readiness.fire(i, bucket_of[i]) for i in parameters]
        return any(completed)

    def _begin(self) -> None:
        self._running = True
        self._has_changed = self._structure.has_changed()
        if self._has_changed:
            self._round.has_more = True
            self._round.misfits = self.known.note_changes()
        self.known.readiness.begin(self.known.expected())

    @torch.no_grad()
    def _launch_ready(self) -> None:
        round_ = self._round
        while round_.launched < round_.last and self.known.readiness.is_complete(round_.launched):
            self._launch_next()

    def _launch_next(self) -> None:
        is_last = self._round.launched == self._round.last  # [Note: the last bucket]
        self._round.launch_next(again=self._has_launched)
        self._has_launched |= is_last

    def _take_what_no_bucket_has(self) -> None:
        """Take gradients of parameters that are not planned, or that are new to the ranks."""
        for i in self.known.membership.joining():
            part = self.known.ledger.take_late(i)
            if part is not None:
                self._round.keep_late(i, part)
        for name, parameter in self._structure.newcomers() if self._has_changed else ():
            part, parameter.grad = parameter.grad, None
            if part is not None:
                self._from_newcomers[name] = part * self.weight

    def _amend(self) -> Amendment:
        """Exchange what no bucket carried on some rank, and agree on who takes part."""
        known = self.known
        mine = Beside(
            late=self._from_newcomers | known.by_name(self._round.late),
            asides=known.by_name(known.ledger.asides()),
            members=known.members,
            has_changed=self._has_changed,
            spoiled=self._round.spoiled,
        )
        return amend(self.exchanger.transport, self._structure, mine, known.rowwise)
