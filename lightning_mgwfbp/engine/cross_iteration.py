"""The optimizer's step, merge group by merge group, just before the next forward needs each.

Reduce-scatters run during backward, all-gathers after it and under the next forward
(`exchange/decoupled.py`); here the forward waits for what it is about to use, and no more
(ByteScheduler, SOSP 2019; DeAR, ICDCS 2023).

[Note: first use] A parameter is waited for when the module it belongs to is called, and when any
torch function is called with it or with another tensor in its memory: a TorchFunctionMode is on
while steps are pending. So parameters that are tied, shared, used early or used outside their
modules are right too, whatever the last forward did. What runs without either, compiled or
scripted code, and what torch.func wraps is waited for before it begins.

[Note: pending] Between step() and the first use an average lies in its bucket; then it is in
`.grad` while the optimizer steps on it. Whether it stays there depends on who clears gradients:
Lightning does after the forward, others before. What the user has put in `.grad` stays there. When
forward ends nothing is pending.

[Note: notice] Where some rank has gradients that no bucket carried, the ranks amend the exchange
together, and all parameters are stepped at once. So that is looked at first.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mgwfbp.engine.first_use import (
    FirstUse,
    address_of,
    has_unseen_code,
    scripted_functions_exist,
)
from lightning_mgwfbp.engine.grouped_step import GroupedStep
from lightning_mgwfbp.engine.layout import Layout
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.engine.suspended import modes_suspended
from lightning_mgwfbp.measure.module_hooks import Compiling, ModuleHook


class CrossIteration:
    """Defers steps of one optimizer, and finishes each merge group's when it is needed.

    Args:
        module: all whose calls may use parameters are its submodules.
        reducer: exchanges the parameters; its exchanger is a `DecoupledExchanger`.
        parameters: in the reducer's order, (N,).
        step: steps the optimizer in parts.
        leaves_averages: whether `.grad` holds an average from the update on, as it would have since
            step(): somebody clears it between forward and backward.
    """

    def __init__(
        self,
        module: nn.Module,
        reducer: Reducer,
        parameters: Iterable[nn.Parameter],
        step: GroupedStep,
        *,
        leaves_averages: bool,
    ) -> None:
        self._reducer = reducer
        self._parameters = list(parameters)
        self._step = step
        self._leaves_averages = leaves_averages
        self._layout: Layout | None = None
        self._bucket_of: dict[int, int] = {}  # by the id of a parameter
        self._addresses: list[set[int]] = []  # of each bucket's parameters
        self._buckets_at: dict[int, set[int]] = {}  # the pending ones, by address
        self._deferred = False
        self._lock = threading.RLock()  # a forward may call modules in several threads
        self._is_completing = False  # in the thread that has the lock
        self._is_noticed: bool | None = None  # [Note: notice]
        self._in_forward = False
        self._pending: set[int] = set()  # buckets
        self._module = module
        modules = list(module.modules())
        self.has_unseen_code = has_unseen_code(modules)  # then no step should be deferred
        self._hooks = list(self._hook_states(modules))
        self._optimizer_hooks = self._hook_optimizer()
        self._calls: RemovableHandle | None = None  # on while a step is pending
        self._compiling = Compiling(self._before_compiling)

    @property
    def optimizer(self) -> Optimizer:
        """The one whose steps are deferred."""
        return self._step.optimizer

    @property
    def pending(self) -> bool:
        """Whether a step is not complete."""
        return self._deferred

    def take_up(self, optimizer: Optimizer) -> None:
        """Complete the step of the optimizer before, and defer those of this one from now on."""
        self.flush()
        for hook in self._optimizer_hooks:
            hook.remove()
        self._step = GroupedStep(optimizer)
        self._optimizer_hooks = self._hook_optimizer()

    def set_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        """Go on with other parameters, in the reducer's order; also while a step is completed."""
        self._parameters[:] = parameters
        for hook in self._hooks:
            hook.remove()
        self._hooks = list(self._hook_states(self._module.modules()))

    def defer(self) -> None:
        """Take the step for made: launch what backward left, and keep the options in force."""
        assert not self._deferred
        self._reducer.launch()
        self._step.capture()
        layout = self._reducer.layout
        if layout is not self._layout:
            self._layout = layout
            self._bucket_of = {
                id(self._parameters[i]): number
                for number, members in enumerate(layout.members)
                for i in members
            }
        # each time: whoever assigns to `.data` moves a parameter
        self._addresses = [
            {address_of(self._parameters[i]) for i in members} - {0} for members in layout.members
        ]
        for number, places in enumerate(self._addresses):
            for address in places:
                self._buckets_at.setdefault(address, set()).add(number)
        self._pending = set(range(len(layout.buckets)))
        self._is_noticed = None
        self._deferred = True
        # global ones come before the modules' own, which may compute with parameters (weight_norm)
        self._calls = register_module_forward_pre_hook(self._before_call)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward: afterwards nothing is pending."""
        is_traced = torch.jit.is_tracing()  # more than once, and shall look the same each time
        if self._deferred and (self.has_unseen_code or scripted_functions_exist() or is_traced):
            self.flush()
        self._finish(())  # before anything is used: [Note: notice]
        if self._deferred:
            self._in_forward = True
            try:
                with FirstUse(self._buckets_at, self._finish, self.flush):
                    yield
            finally:
                self._in_forward = False
        else:
            yield
        self.flush()

    def flush(self) -> None:
        """Complete the step, if one is pending. Waits for the network.

        Raises:
            RuntimeError: an exchange failed; so will the next call, since weights are incomplete.
        """
        with self._lock:
            if self._deferred and not self._is_completing:
                with self._completing():
                    self._complete()

    def close(self) -> None:
        """Remove all hooks; what is pending is lost unless it was flushed."""
        for hook in [*self._hooks, *self._optimizer_hooks]:
            hook.remove()
        self._hooks.clear()
        self._compiling.close()
        if self._deferred:
            self._not_pending(list(self._pending))
            self._end()

    def _hook_states(self, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
        """Whoever saves or loads weights or optimizer state finds them complete."""
        flush = ModuleHook(self.flush)
        for module in modules:
            if not isinstance(module, torch.jit.ScriptModule):
                yield module.register_state_dict_pre_hook(flush)
                yield module.register_load_state_dict_pre_hook(flush)

    def _hook_optimizer(self) -> list[RemovableHandle]:
        flush, optimizer = ModuleHook(self.flush), self._step.optimizer
        return [
            optimizer.register_state_dict_pre_hook(flush),
            optimizer.register_load_state_dict_pre_hook(flush),
        ]

    def _before_compiling(self) -> None:
        self.has_unseen_code = True  # whatever it is, and whoever calls it
        self._flush_uncompiled()

    def _flush_uncompiled(self) -> None:
        # optimizers compute otherwise where they take themselves for compiled
        compiler: Any = torch.compiler
        before, compiler._is_compiling_flag = compiler._is_compiling_flag, False
        try:
            self.flush()
        finally:
            compiler._is_compiling_flag = before

    def _before_call(self, module: nn.Module, *_: Any) -> None:  # [Note: forward hooks]
        if torch.compiler.is_dynamo_compiling() or not self._pending:
            return
        if torch.compiler.is_compiling():  # torch.export calls it with others in their places
            self._flush_uncompiled()
            return
        # else nobody sees which modules and functions it calls, and with what
        is_seen = self._in_forward and not isinstance(module, torch.jit.ScriptModule)
        parameters = module._parameters.values() if is_seen else module.parameters()
        own = {self._bucket_of[id(p)] for p in parameters if id(p) in self._bucket_of}
        if self._in_forward:
            self._finish(own & self._pending)
        elif own:
            self.flush()

    def _finish(self, numbers: Collection[int]) -> None:
        with self._lock:
            self._finish_locked(numbers)

    def _finish_locked(self, numbers: Collection[int]) -> None:
        numbers = self._pending.intersection(numbers)  # another thread may have come first
        if not self._deferred or self._is_completing:
            return
        if self._is_noticed is not None and not numbers:
            return
        with self._completing():
            if self._is_noticed is None:
                self._is_noticed = self._reducer.is_noticed()
            if self._is_noticed:
                self._complete()
            elif numbers:
                parameters = self._of_buckets(numbers)
                with self._averages_in_grad(parameters):
                    for number in numbers:
                        self._reducer.finish_bucket(number)
                    self._not_pending(numbers)
                    self._step.step_on(parameters)

    def _complete(self) -> None:
        self._is_noticed = self._reducer.is_noticed()
        pending = self._of_buckets(self._pending)
        with self._averages_in_grad(self._parameters):
            self._reducer.complete()
            self._not_pending(list(self._pending))
            self._end()
            self._step.step_on(self._parameters if self._is_noticed else pending)

    @contextmanager
    def _averages_in_grad(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Within, `.grad` is free for averages; then it is what it was again, if that was anything:
        [Note: pending].

        Args:
            parameters: those that are completed; more may join them meanwhile.
        """
        own = {id(p): p.grad for p in parameters}
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter in parameters:
                mine = own.get(id(parameter))
                if mine is not None or not self._leaves_averages:
                    parameter.grad = mine

    def _end(self) -> None:
        self._deferred = False
        assert self._calls is not None
        self._calls.remove()

    def _of_buckets(self, numbers: Iterable[int]) -> list[nn.Parameter]:
        assert self._layout is not None
        return [self._parameters[i] for n in numbers for i in self._layout.members[n]]

    def _not_pending(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._pending.remove(number)
            for address in self._addresses[number]:
                self._buckets_at[address].remove(number)
                if not self._buckets_at[address]:
                    del self._buckets_at[address]

    @contextmanager
    def _completing(self) -> Iterator[None]:
        """Outside of what the forward in which it happens may be in."""
        self._is_completing = True
        try:
            with modes_suspended():
                yield
        finally:
            self._is_completing = False
