"""`BackwardCalls`: sees where autograd is called, whoever calls it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CALLS = (torch.Tensor.backward, torch.autograd.backward)


class BackwardCalls(TorchFunctionMode):
    """While on, holds `around()` around each call of `Tensor.backward` or `autograd.backward`.

    Whoever has a backward of his own may look at `.grad` right after that call. A hook in the graph
    would not do: it fires on no rank whose loss depends on no parameter, but all must come to an
    exchange equally often. Calls from within backward (re-entrant checkpointing) are not seen.

    Attributes:
        count: how many calls there were that did not fail.
    """

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._around = around
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _CALLS:
            return func(*args, **(kwargs or {}))
        with self._around():
            result = func(*args, **(kwargs or {}))
        self.count += 1
        return result
