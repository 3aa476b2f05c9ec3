"""`StepsInBackward`: notices optimizers that step before gradients are averaged.

A hook such as `Tensor.register_post_accumulate_grad_hook` may step an optimizer as soon as a
gradient exists, to save memory. What it steps on is this rank's own gradient, no average.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepsInBackward:
    """Warns, once, of an optimizer's step within autograd on a parameter that is exchanged.

    Args:
        named_parameters: those that are exchanged.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._has_warned = False
        self.set_parameters(named_parameters)

    def set_parameters(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch these from now on."""
        self._named = list(named_parameters)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """To be held around each backward."""
        handle = register_optimizer_step_pre_hook(self)
        try:
            yield
        finally:
            handle.remove()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """What torch calls before the step of any optimizer."""
        if self._has_warned or torch._C._current_graph_task_id() == -1:
            return  # autograd is not at work: a backward of the user's own steps after it
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = (n for n, p in self._named if id(p) in stepped and p.grad is not None)
        name = next(names, None)
        if name is None:
            return
        self._has_warned = True
        warnings.warn(
            f"{type(optimizer).__name__} steps {name!r} while backward runs, as in a gradient hook:"
            " on this rank's own gradient, before it is averaged. The ranks' weights drift apart"
            " (under DistributedDataParallel as well). Step after backward: leave that to Trainer,"
            " or call `optimizer.step()` after `self.manual_backward(loss)`.",
            stacklevel=2,
        )
