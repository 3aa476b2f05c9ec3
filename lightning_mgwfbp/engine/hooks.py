"""The two hooks that watch one parameter's gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class GradientHooks:
    """Calls `before` and `after` whenever autograd adds to `parameter.grad`.

    Neither fires under `torch.autograd.grad`, as a hook on the tensor itself would; neither is
    copied or pickled with the parameter.

    Args:
        parameter: requires grad.
        before: called with the gradient that is about to be added.
        after: called with the parameter.
    """

    def __init__(
        self, parameter: nn.Parameter, before: Callable[[Any], None], after: Callable[[Any], None]
    ) -> None:
        with torch.enable_grad():
            node: Any = parameter.expand_as(parameter).grad_fn
        self._accumulator = node.next_functions[0][0]  # autograd itself holds it only weakly
        self._handles = (
            self._accumulator.register_prehook(before),
            parameter.register_post_accumulate_grad_hook(after),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
