"""`DeferredStep`: a step that returns at once, its update to follow in the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_mgwfbp.engine.averaged_step import Closure
from lightning_mgwfbp.engine.cross_iteration import CrossIteration
from lightning_mgwfbp.engine.grouped_step import is_step_watched, why_not_in_parts
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.compressors import Cast, as_written
from lightning_mgwfbp.exchange.methods import ExchangeMethod


def why_not_deferred(
    optimizers: Sequence[Optimizer], method: ExchangeMethod | None, *, scales_loss: bool
) -> Iterator[str]:
    """Say what stands against deferring steps, whoever drives the training."""
    if not isinstance(method, Cast | None):
        yield f"`compressor={as_written(method)}` does not send gradients by all-reduces"
    if scales_loss:
        yield "a GradScaler must see all averages before the first update"
    devices = {p.device for o in optimizers for group in o.param_groups for p in group["params"]}
    if len(devices) > 1:
        yield f"the parameters lie on {' and '.join(sorted(map(str, devices)))}"
    for device in devices:
        if device.type == "cuda":
            yield (
                f"the parameters lie on {device}, and updates deferred into the next forward are"
                " not ordered behind their averages on CUDA yet"
            )
    if len(optimizers) != 1:
        yield f"there are {len(optimizers)} optimizers, not one"
    for optimizer in optimizers:
        if reason := why_not_in_parts(optimizer):
            yield reason


class DeferredStep:
    """Defers what can be deferred, and takes the other steps whole.

    Whole are: the first, which makes the optimizer's state; those before there is a plan, or under
    `no_sync`; those whose averages are in `.grad` already or cannot be in buckets, being sparse;
    and all where somebody has hooks on them, or where compiled or scripted code must find them
    complete.

    Args:
        optimizer: whose step it is.
        reducer: exchanges its parameters.
        cross_iteration: completes deferred steps.
        step: called as step(optimizer, closure, **kwargs), such as a precision plugin's.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        reducer: Reducer,
        cross_iteration: CrossIteration,
        step: Callable[..., Any],
    ) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._cross_iteration = cross_iteration
        self._step = step
        self._has_stepped = False
        self._exchanges = reducer.exchanges  # as many as steps have caused

    def __call__(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Step, or take the step for made. Collective."""
        return self._step(self, closure, **kwargs)

    def step(self, closure: Closure | None = None) -> Any:
        """What a precision plugin calls in the place of the optimizer's own."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self._cross_iteration.pending:
            raise RuntimeError(
                "The last step is not complete: since then backward has used weights that it would"
                " have changed. Give `module=...` the one whose call computes the loss, or call"
                " flush() before you use its weights without calling it."
            )
        self._reducer.compare_weights()  # here all ranks come by, wherever they have completed
        if self._is_averaged() or self._must_be_whole():
            self.average_if_due()
            self._optimizer.step()
            self._has_stepped = True
            self.forget_averages()
        else:
            self._cross_iteration.defer()
            self._exchanges = self._reducer.exchanges + 1  # when it is complete
        self._reducer.stepped()
        return result

    def average_if_due(self) -> None:
        """Average what has come since the last exchange, and where there was none since the last
        step, whatever other ranks may have."""
        if not self._is_averaged():
            self._reducer.synchronize()

    def forget_averages(self) -> None:
        """Have the next step need others: those so far are used up, or thrown away."""
        self._exchanges = self._reducer.exchanges

    def _is_averaged(self) -> bool:
        return self._reducer.exchanges > self._exchanges and not self._reducer.unsynchronized

    def _must_be_whole(self) -> bool:
        return (
            not self._has_stepped
            or not self._reducer.syncing
            or not self._reducer.overlaps
            or bool(self._reducer.known.rowwise)
            or self._cross_iteration.has_unseen_code
            or is_step_watched(self._optimizer)
        )
