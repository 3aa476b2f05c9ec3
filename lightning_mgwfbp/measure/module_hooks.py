"""Hooks on modules that are scripted, traced, exported, copied and pickled while they train.

[Note: forward hooks] None lies on a module: TorchScript would compile it. Calls are seen by global
hooks of torch's, which are on only while something is to be told: each call of any module costs 2
to 4 us more then, torch warns of them at each call of a torch.compile(module), and
torch.export.export(strict=True) does not work. Compiled code is bound to the hooks that were on
when it was compiled, so from then on there are none (`Compiling`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._dynamo.callback import callback_handler


class ModuleHook:
    """Calls `what()`, whatever the hook is given; for state dicts, whose hooks TorchScript ignores.

    Users copy and pickle modules in the middle of training (averaged weights, snapshots), and their
    hooks with them. A copy of this one does nothing: what it calls belongs to the original. Neither
    does it in compiled code, which would be traced into what it calls.
    """

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = what

    def __call__(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._what()

    def __reduce__(self) -> Any:
        return ModuleHook, (_nothing,)


def _nothing() -> None:
    return


class Compiling:
    """Calls `what()` just before torch.compile compiles anything, until it is closed.

    Args:
        what: a method, whose object is not kept alive.
    """

    def __init__(self, what: Callable[[], None]) -> None:
        self._what = weakref.WeakMethod(what)
        callback_handler.register_start_callback(self._begins)

    def close(self) -> None:
        if self._begins in callback_handler.start_callbacks:
            callback_handler.remove_start_callback(self._begins)

    def _begins(self, *_: Any) -> None:
        what = self._what()
        if what is not None:
            what()


def is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled, by `module.compile()` or `torch.compile`."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules
