"""`ModuleCalls`: tells a session of each forward, where no strategy does."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.measure.module_hooks import Compiling, is_compiled


class ModuleCalls:
    """Tells `session` of each call of `module` while it profiles, or has deferred a step.

    As under DistributedDataParallel a call that records a graph, outside of `no_sync`, says that
    the next backward is training's own: it arms the reducer. When nothing else is to be told, the
    hook that sees it is gone before the module calls others.

    Where `module` is compiled it tells nothing: then no forward is timed, no step deferred, and any
    backward outside of `no_sync` taken for training's own. Where anything else is compiled later,
    calls arm the reducer, and no more.
    """

    def __init__(self, module: nn.Module | None, session: Session) -> None:
        self._module = module
        self._session = session
        self._is_compiled = module is not None and any(map(is_compiled, module.modules()))
        self._meets_compiled = self._is_compiled
        if self._is_compiled:
            session.reducer.is_always_armed = True
        self._hooks: list[RemovableHandle] = []  # [Note: forward hooks]
        self._arming: list[RemovableHandle] = []
        # whoever is never closed is not kept alive by hooks, nor called by them for ever
        weakref.finalize(self, _remove, self._hooks, self._arming)
        self._compiling = Compiling(self._before_compiling)
        # with the exception that is being handled around the call, and is not the call's own
        self._around: list[tuple[AbstractContextManager[None], BaseException | None]] = []

    def watch(self) -> None:
        """Tell of calls from now on; before a step, whose own hook must see them later."""
        if not (self._hooks or self._module is None or self._meets_compiled):
            self._hooks += [
                register_module_forward_pre_hook(_Weakly(self._begin)),
                register_module_forward_hook(_Weakly(self._end), always_call=True),
            ]

    def rest(self) -> None:
        """After an exchange: tell of no more calls than the session needs to know of."""
        if self._meets_compiled or not (self._session.warmup.running or self._session.pending):
            self._remove_hooks()
        if self._module is not None and not self._is_compiled and not self._hooks:
            _remove(self._arming)
            self._arming.append(register_module_forward_pre_hook(_Weakly(self._arm)))

    def close(self) -> None:
        """Remove all hooks."""
        self._remove_hooks()
        self._compiling.close()

    def _remove_hooks(self) -> None:
        _remove(self._hooks, self._arming)

    def _arm(self, module: nn.Module, *_: Any) -> None:
        if module is self._module and self._is_for_training():
            self._session.reducer.arm()
            _remove(self._arming)

    def _is_for_training(self) -> bool:
        return torch.is_grad_enabled() and self._session.reducer.syncing

    def _before_compiling(self) -> None:
        self._meets_compiled = True  # hooks stay until `rest`: a call that has begun must end

    def _begin(self, module: nn.Module, *_: Any) -> None:
        if module is not self._module:
            return
        self._session.warmup.forward_begins()
        self._around.append((self._session.forward(), sys.exc_info()[1]))
        self._around[-1][0].__enter__()

    def _end(self, module: nn.Module, *_: Any) -> None:
        if module is not self._module:
            return
        if not self._around:  # the call failed before it began
            return
        forward, handled = self._around.pop()
        kind, error, trace = sys.exc_info()
        forward.__exit__(*((None, None, None) if error is handled else (kind, error, trace)))
        if self._is_for_training():
            self._session.reducer.arm()
            self._session.warmup.backward_begins()


class _Weakly:
    """Calls a method for as long as its object lives."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        method = self._method()
        if method is not None:
            method(*args)


def _remove(*hooks: list[RemovableHandle]) -> None:
    for each in hooks:
        while each:
            each.pop().remove()
