"""`Session`: the exchange of one training, from its first step to what a checkpoint keeps of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_mgwfbp.engine.agreement import facts_of, require_agreement, require_success
from lightning_mgwfbp.engine.averaged_step import AveragedStep
from lightning_mgwfbp.engine.backward_calls import BackwardCalls
from lightning_mgwfbp.engine.checkpoint import WHERE, ExchangeState, SavedState
from lightning_mgwfbp.engine.cross_iteration import CrossIteration
from lightning_mgwfbp.engine.deferred_step import DeferredStep, why_not_deferred
from lightning_mgwfbp.engine.divergence import DEFAULT_CHECKS, Checks, DivergenceWatch
from lightning_mgwfbp.engine.grouped_step import GroupedStep
from lightning_mgwfbp.engine.membership import require_unexchanged
from lightning_mgwfbp.engine.options import Settings, require_no_momentum
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.engine.steps_in_backward import StepsInBackward
from lightning_mgwfbp.engine.structure import Named, Structure
from lightning_mgwfbp.engine.warmup import WarmUp
from lightning_mgwfbp.exchange.comm_hook import DDPCommHook
from lightning_mgwfbp.exchange.compressors import Cast, as_written
from lightning_mgwfbp.exchange.decoupled import DecoupledExchanger
from lightning_mgwfbp.exchange.exchangers import Exchanger
from lightning_mgwfbp.exchange.methods import make_exchanger
from lightning_mgwfbp.exchange.roll_call import RollCall
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import MergePlan


class Session:
    """A reducer, and the warm-up that makes its plans.

    Args:
        model: its name, for records.
        structure: the model's parameters, and the optimizers that will step them.
        transport: joins the ranks.
        settings: what the user chose.
        module: the one whose forward uses the parameters, if it is known.
        gradient_scale: says what gradients are multiplied by; None: by nothing.
        is_always_armed: see `Reducer`.
        leaves_averages: see `CrossIteration`.

    Raises:
        ValueError: no parameter is trainable, one is exchanged by somebody else already, or an
            optimizer does not go with the compressor.
    """

    def __init__(
        self,
        model: str,
        structure: Structure,
        transport: Transport,
        settings: Settings,
        module: nn.Module | None = None,
        gradient_scale: Callable[[], float] | None = None,
        *,
        is_always_armed: bool = False,
        leaves_averages: bool = False,
    ) -> None:
        self._settings = settings
        self._require_no_momentum(structure.optimizers)
        named = structure.named
        require_unexchanged(named)
        method, defers = settings.compressor, settings.schedule == "cross_iteration"
        if defers:
            assert isinstance(method, Cast | None)
            halves = transport.halves(named[0][1].device)
            exchanger: Exchanger = DecoupledExchanger(transport, halves, method)
        else:
            exchanger = make_exchanger(method, transport)
        if gradient_scale is not None:
            exchanger.gradient_scale = gradient_scale
        compresses_none = not any(exchanger.compresses(p) for _, p in named)
        if exchanger.keeps_residuals and compresses_none and transport.rank == 0:
            warnings.warn(
                f"`compressor={as_written(method)}` has no effect: all of the model's parameters"
                " are too small for it, and travel exactly.",
                stacklevel=2,
            )
        self._structure = structure
        self._steps_in_backward = StepsInBackward(named if transport.rank == 0 else ())
        self._transport = transport
        every = settings.detect_divergence_every_n_steps
        checks = DEFAULT_CHECKS if every is None else Checks(every)
        # a hook may let ranks drift apart on purpose: torch's noop_hook, its post_localSGD_hook
        is_free = every is None and isinstance(method, DDPCommHook)
        is_watched = transport.world_size > 1 and not is_free
        self._watch = DivergenceWatch(named, transport, checks) if is_watched else None
        try:
            self.reducer = Reducer(
                structure,
                exchanger,
                static_graph=settings.static_graph,
                watch=self._watch,
                is_always_armed=is_always_armed,
            )
        except ValueError:
            exchanger.close()  # it may have connections of its own
            raise
        self._cross_iteration: CrossIteration | None = None
        with ExitStack() as opened:  # which an error closes, too
            opened.callback(self.reducer.close)
            self.roll_call = RollCall.opened(transport)
            if self.roll_call is not None:
                opened.callback(self.roll_call.close)
            if defers:
                assert module is not None
                (optimizer,) = structure.optimizers
                self._cross_iteration = CrossIteration(
                    module,
                    self.reducer,
                    [p for _, p in named],
                    GroupedStep(optimizer),
                    leaves_averages=leaves_averages,
                )
                opened.callback(self._cross_iteration.close)
            self.warmup = WarmUp(model, named, transport, self.reducer, settings, module)
            opened.callback(self.warmup.stop)
            self.reducer.known.on_replaced = self._go_on_with
            self._opened = opened.pop_all()

    @property
    def parameters(self) -> Named:
        """All of the model's that the ranks know of."""
        return self._structure.named

    @property
    def plan(self) -> MergePlan | None:
        """The plan in force, None during the warm-up."""
        return None if self.warmup.running else self.reducer.plan

    @property
    def saved_plan(self) -> MergePlan | None:
        """The plan that was given; nothing is measured then."""
        planner = self._settings.planner
        return planner if isinstance(planner, MergePlan) else None

    @property
    def pending(self) -> bool:
        """Whether a step was taken whose update is not complete."""
        return self._cross_iteration is not None and self._cross_iteration.pending

    def steps_of(
        self, optimizers: Sequence[Optimizer], step: Callable[..., Any]
    ) -> dict[int, AveragedStep | DeferredStep]:
        """What takes the place of `step(optimizer, closure, **kwargs)` of each, by its id.

        Args:
            optimizers: all that step the model's parameters from now on.
            step: steps one, such as a precision plugin's.
        """
        self._require_no_momentum(optimizers)
        self.flush()
        cross = self._cross_iteration
        if cross is not None and self._can_defer(optimizers):
            (optimizer,) = optimizers
            if optimizer is not cross.optimizer:
                cross.take_up(optimizer)
            return {id(optimizer): DeferredStep(optimizer, self.reducer, cross, step)}
        return {id(each): AveragedStep(each, self.reducer, step) for each in optimizers}

    def _require_no_momentum(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            require_no_momentum(self._settings.compressor, optimizer)

    def _can_defer(self, optimizers: Sequence[Optimizer]) -> bool:
        # what else stands against it was refused before the session began
        reasons = why_not_deferred(optimizers, self._settings.compressor, scales_loss=False)
        reason = next(reasons, None)
        if reason is not None and self._transport.rank == 0:
            warnings.warn(
                f"From now on updates are not deferred into the next forward: {reason}.",
                stacklevel=2,
            )
        return reason is None

    def forward(self) -> AbstractContextManager[None]:
        """To be held around each forward."""
        if self._cross_iteration is None:
            return nullcontext()
        return self._cross_iteration.forward()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around training's own backward: puts averages in `.grad`, unless they are to come later.

        They are there as soon as a call of `Tensor.backward` within has ended; each has an exchange
        of its own, and there is one where there was none. So all ranks have equally many.
        """
        if self._cross_iteration is not None:
            with self._steps_in_backward.watched(), self.reducer.armed():
                yield
            return
        around = BackwardCalls(self._averaged_backward)
        with self._steps_in_backward.watched(), around as calls:
            yield
        if not calls.count:
            self.reducer.synchronize()

    @contextmanager
    def _averaged_backward(self) -> Iterator[None]:
        with self.reducer.armed():
            yield
        self.reducer.synchronize()

    def flush(self) -> None:
        """Complete the update of a step that was taken. Waits for the network."""
        if self._cross_iteration is not None:
            self._cross_iteration.flush()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, for schedules."""
        self.reducer.exchanger.epoch = epoch

    def set_contributors(self, ranks: Collection[int]) -> None:
        """Say which ranks contribute to the exchanges from now on: averages are over these."""
        is_one = self._transport.rank in ranks
        self.reducer.weight = self._transport.world_size / len(ranks) if is_one else 0.0

    def state(self) -> ExchangeState:
        """What this rank has left behind, and what it depends on."""
        return ExchangeState(
            exchanger=self.reducer.exchanger.state_dict(),
            plan=self.plan,
            rowwise=self.reducer.known.rowwise,
            made_for=self._circumstances(),
        )

    def resume(self, saved: Mapping[str, Any] | None) -> None:
        """Take up what `ExchangeState.gathered` gave, all of it or nothing. Collective.

        Its plan is installed if it was made in the same circumstances, and nothing is measured
        then: another plan would compress other groups, and the bits would differ.

        Args:
            saved: the same on all ranks; None where a checkpoint has none.

        Raises:
            ValueError: on every rank alike: it is damaged, or was saved for another model.
            RuntimeError: the ranks have different ones.
        """
        state, failure = None, None
        try:
            state = (
                None if saved is None else SavedState.checked(saved, dict(self._structure.named))
            )
        except ValueError as error:
            failure = error
        require_success(self._transport, failure)
        require_agreement(self._transport, dict(facts_of(WHERE, state)))
        if state is None:
            return
        self.reducer.expect_rowwise(state.rowwise)
        self.reducer.exchanger.load_state_dict(state.exchanger)
        if state.plan is not None and state.made_for == self._circumstances():
            self.warmup.resume(state.plan)

    def close(self) -> None:
        """Remove all hooks, and wait for what is still on its way."""
        self._opened.close()

    def _go_on_with(self, named: Named) -> None:
        """The model has other parameters than before."""
        if self._transport.rank == 0:
            self._steps_in_backward.set_parameters(named)
        self.warmup.set_parameters(named)
        if self._watch is not None:
            self._watch.set_parameters(named)
        if self._cross_iteration is not None:
            self._cross_iteration.set_parameters(p for _, p in named)

    def _circumstances(self) -> dict[str, str]:
        return {
            "planner": repr(self._settings.planner),
            "compressor": repr(self._settings.compressor),
            "ranks": str(self._transport.world_size),
        }
