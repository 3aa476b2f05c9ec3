"""`ModuleHook`: a hook on a module that stays behind where the module is copied or pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ModuleHook:
    """Calls `what()`, whatever the hook is given.

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
