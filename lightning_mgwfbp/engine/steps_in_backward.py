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
        self._names = {id(p): name for name, p in named_parameters}

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
        if torch._C._current_graph_task_id() == -1:
            return  # autograd is not at work: a backward of the user's own steps after it
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        names = [self._names.get(id(p)) for p in stepped if p.grad is not None]
        name = next(filter(None, names), None)
        if name is None:
            return
        self._names.clear()  # once is enough
        warnings.warn(
            f"{type(optimizer).__name__} steps {name!r} while backward runs, as in a gradient hook:"
            " on this rank's own gradient, before it is averaged. The ranks' weights drift apart"
            " (under DistributedDataParallel as well). Step after backward: leave that to Trainer,"
            " or call `optimizer.step()` after `self.manual_backward(loss)`.",
            stacklevel=2,
        )
