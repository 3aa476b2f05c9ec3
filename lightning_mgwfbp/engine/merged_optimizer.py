"""`MergedOptimizer`: the precision-aware wrapper around the user's own optimizer.

Within Lightning the strategy holds one for each optimizer of the Trainer, all of them sharing a
reducer. Alone it takes the place of Horovod's `DistributedOptimizer`. No optimizer is
re-implemented: options, state and step stay the wrapped one's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgwfbp.engine.agreement import (
    optimizer_facts,
    parameter_facts,
    require_agreement,
    require_exchangeable,
    version_facts,
)
from lightning_mgwfbp.engine.averaged_step import Closure
from lightning_mgwfbp.engine.deferred_step import why_not_deferred
from lightning_mgwfbp.engine.module_calls import ModuleCalls
from lightning_mgwfbp.engine.options import Options, Schedule, require_choice
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.engine.structure import Named, Structure
from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.exchange.methods import ExchangeMethod, resolve_compressor
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import AlphaBeta, MergePlan, ModelProfile, Planner


class _Forwarded:
    """An attribute that lives in the wrapped optimizer only."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return getattr(wrapper.optimizer, self._name)

    def __set__(self, wrapper: Any, value: Any) -> None:
        setattr(wrapper.optimizer, self._name, value)

    def __delete__(self, wrapper: Any) -> None:
        delattr(wrapper.optimizer, self._name)


def _require_deferrable(
    optimizer: Optimizer,
    compressor: str | ExchangeMethod | None,
    grad_scaler: torch.amp.GradScaler | None,
    module: nn.Module | None,
) -> None:
    method = resolve_compressor(compressor)
    reasons = why_not_deferred([optimizer], method, scales_loss=grad_scaler is not None)
    reason = next(reasons, None)
    if module is None:
        reason = "`module=...` must be the one whose next call is to wait for updates"
    if reason is not None:
        raise ValueError(f'`MergedOptimizer(schedule="cross_iteration")` cannot work: {reason}.')


def _require_named(param_groups: Sequence[dict[str, Any]], named: Named) -> None:
    known = {id(p) for _, p in named}
    for group in param_groups:
        given = group["params"]
        if not all(id(p) in known for p in ([given] if isinstance(given, Tensor) else given)):
            raise ValueError(
                "The optimizer steps a parameter that `named_parameters` did not name: its"
                " gradient would never be averaged. Give MergedOptimizer all of"
                " `model.named_parameters()`; for layers that come later, give `module=model` too."
            )


def _plain_step(optimizer: Optimizer, closure: Closure | None, **kwargs: Any) -> Any:
    return optimizer.step(**kwargs) if closure is None else optimizer.step(closure, **kwargs)


def _looks_up(named: Named, module: nn.Module | None, optimizer: Optimizer) -> Callable[[], Named]:
    """What returns the parameters that are exchanged by now: those that were named, under the
    names that `module` has for them, if it has any, and those of its others that `optimizer`
    steps."""
    ids = {id(p) for _, p in named}
    if module is None or not any(id(p) in ids for p in module.parameters()):
        return lambda: named
    references = [weakref.ref(p) for _, p in named]  # lest those that are gone live on

    def current() -> Named:
        kept = {id(p) for reference in references if (p := reference()) is not None}
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in module.named_parameters() if id(p) in kept | stepped]

    return current


class MergedOptimizer(Optimizer):
    """Steps on gradients that are averaged over all ranks.

    Exchanges merge group by merge group while backward runs. The first `warmup_steps` steps are
    profiled, with gradients exchanged after backward; then the plan is made.

    Averages are in `.grad` after `synchronize()`, which `step()` calls unless you did: call it
    yourself before `GradScaler.unscale_` and before you clip. Use `no_sync()` around all but the
    last backward of an accumulation window.

    Args:
        optimizer: yours. Learning-rate schedulers may hold either.
        named_parameters: `model.named_parameters()`, the same on all ranks, at least all that
            the optimizer steps, and none that another MergedOptimizer exchanges.
        planner: "auto", "optimal", "mgwfbp", "threshold", "wfbp", "single", or a Planner; or a
            plan made before.
        compressor: None, a name ("fp16", "bf16", "topk", "randomk", "int8"), a Compressor,
            PowerSGD or DDPCommHook.
        transport: carries the gradients; by default torch.distributed over all ranks.
        warmup_steps: steps to profile.
        replan_every_n_steps: profile and plan anew after so many steps.
        detect_divergence_every_n_steps: compare the bits of all weights over the ranks after every
            so many steps; a difference is an error. None: compare a twentieth of them every 50
            steps; last bits that differ are a warning then. (With DDPCommHook: nothing.)
        profile, link: what was measured before; with both only a compressor is timed.
        static_graph: a promise that every backward uses the same parameters on all ranks.
        grad_scaler: the one you scale losses with: what a compressor leaves behind must not be
            kept in its units, which change.
        schedule: "backward", or "cross_iteration": `step()` returns at once, and each merge group
            is stepped when the next call of `module` needs it; until then, `flush()` before you
            look at weights other than by a state_dict. Gradients are gone after that.
        module: the one you call in each step. A call of it that records a graph, outside of
            `no_sync`, says that the next backward is training's; without it every backward outside
            of `no_sync` is. Needed for "cross_iteration", and for layers that come later.

    Raises:
        ValueError: an argument is out of range, the optimizer steps unnamed parameters, or another
            one exchanges the same.
        RuntimeError: the ranks' models or options differ.

    Example:
        >>> optimizer = MergedOptimizer(  # doctest: +SKIP
        ...     torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
        ... )
    """

    tuned: Tuned | None  # the last plan with what it was made from; None before

    def __init__(
        self,
        optimizer: Optimizer,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        *,
        planner: str | Planner | MergePlan = "auto",
        compressor: str | ExchangeMethod | None = None,
        transport: Transport | None = None,
        warmup_steps: int = 5,
        replan_every_n_steps: int | None = None,
        detect_divergence_every_n_steps: int | None = None,
        profile: ModelProfile | str | None = None,
        link: AlphaBeta | str | None = None,
        static_graph: bool = False,
        grad_scaler: torch.amp.GradScaler | None = None,
        schedule: Schedule = "backward",
        module: nn.Module | None = None,
    ) -> None:
        require_choice("MergedOptimizer(schedule=...)", schedule, get_args(Schedule))
        if schedule == "cross_iteration":
            _require_deferrable(optimizer, compressor, grad_scaler, module)
        named = list(named_parameters)
        _require_named(optimizer.param_groups, named)
        options = Options(
            planner=planner,
            compressor=compressor,
            warmup_steps=warmup_steps,
            replan_every_n_steps=replan_every_n_steps,
            detect_divergence_every_n_steps=detect_divergence_every_n_steps,
            profile=profile,
            link=link,
            static_graph=static_graph,
            schedule=schedule,
        )
        scale = None if grad_scaler is None else grad_scaler.get_scale
        with ExitStack() as opened:  # which an error closes
            if transport is None:
                transport = TorchTransport()
                opened.callback(transport.close)
            facts = {**version_facts(), **options.facts(), "grad_scaler": repr(scale is not None)}
            facts |= {**parameter_facts(named), **optimizer_facts([optimizer], named)}
            require_agreement(transport, facts)
            require_exchangeable("Parameter", named)
            self._session = Session(
                "",
                Structure(named, _looks_up(named, module, optimizer), lambda: [optimizer]),
                transport,
                options.settle(transport),
                module,
                scale,
                is_always_armed=module is None,
            )
            opened.callback(self._session.close)
            self._calls = ModuleCalls(module, self._session)
            self._calls.watch()
            opened.callback(self._calls.close)
            # Optimizer.__init__ is not called: whatever it would set up is the wrapped one's
            self.optimizer = optimizer
            self._module = module
            self.reducer = self._session.reducer
            self._step = self._session.steps_of([optimizer], _plain_step)[id(optimizer)]
            self.tuned = self._session.warmup.start()
            self._calls.rest()
            opened.callback(self._session.flush)
            self._opened = opened.pop_all()

    param_groups = _Forwarded()
    state = _Forwarded()
    defaults = _Forwarded()
    # set by GradScaler around the step of an optimizer that unscales by itself
    grad_scale = _Forwarded()
    found_inf = _Forwarded()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # GradScaler.step asks for this before it looks at gradients, which must be averages by then
        self._step.average_if_due()
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not wrapped yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "A MergedOptimizer cannot be copied or pickled: a copy would exchange the same"
            " gradients again. Copy the optimizer that it wraps (`.optimizer`), or save its"
            " state_dict()."
        )

    def __repr__(self) -> str:
        return f"MergedOptimizer({self.optimizer!r})"

    @property
    def plan(self) -> MergePlan | None:
        """The plan in force, None during the warm-up."""
        return self._session.plan

    def synchronize(self) -> None:
        """Wait until the averages are in `.grad`. Collective; a no-op under `no_sync`."""
        self.reducer.synchronize()
        self._calls.rest()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within, gradients accumulate locally; the first exchange outside carries them too."""
        return self.reducer.no_sync()

    def step(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Step the wrapped optimizer on the averages; each call of `closure` is synchronised."""
        self._calls.watch()
        result = self._step(closure, **kwargs)
        self.tuned = self._session.warmup.step_ended() or self.tuned
        self._calls.rest()
        return result

    def flush(self) -> None:
        """Complete the update of the last step, which "cross_iteration" has deferred."""
        self._session.flush()
        self._calls.rest()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those on their way: they are waited for first, and what a
        compressor has left behind of them is forgotten.

        That is collective, so of gradients that are exchanged and that no step has used, each rank
        must have some, or none may. Those of a step that was taken are left to it.
        `model.zero_grad()` knows nothing of all these: call this one instead.
        """
        if not self._session.pending:
            if self.reducer.syncing and self.reducer.has_begun:
                self.synchronize()
            self.reducer.discard()
            self._step.forget_averages()
            self._calls.rest()
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch begins: a compressor's schedule may go by it."""
        self._session.set_epoch(epoch)

    def exchange_state_dict(self) -> dict[str, Any] | None:
        """What the compressor has left behind on all ranks, to be saved with the optimizer's state.

        Collective; rank 0 gets it, the others None, as all do where nothing is left behind.
        """
        return self._session.state().gathered(self.reducer.exchanger.transport)

    def load_exchange_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up what `exchange_state_dict` gave, the same on all ranks, however many they are.

        Raises:
            ValueError: on every rank alike: it is damaged, or was saved for another model.
        """
        self._session.resume(saved)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step these parameters too: some of those that were named, or that `module` has by now.

        Raises:
            ValueError: others, whose gradients would never be averaged.
        """
        known = self._session.parameters
        module = self._module
        added = [] if module is None else list(module.named_parameters())
        _require_named([param_group], known + added)
        self.optimizer.add_param_group(param_group)

    def close(self) -> None:
        """Complete the last step and remove all hooks; the wrapped optimizer goes on alone."""
        self._opened.close()
