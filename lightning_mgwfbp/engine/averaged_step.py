"""`AveragedStep`: an optimizer's step, on gradients that are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from lightning_mgwfbp.engine.reducer import Reducer

Closure = Callable[[], Any]


class AveragedStep:
    """Averages before each step what has not been averaged since the last one.

    Several optimizers may share a reducer, which exchanges the parameters of all.

    Args:
        optimizer: whose step it is.
        reducer: exchanges its parameters.
        step: called as step(optimizer, closure, **kwargs), such as a precision plugin's.
    """

    def __init__(self, optimizer: Optimizer, reducer: Reducer, step: Callable[..., Any]) -> None:
        self._optimizer = optimizer
        self._reducer = reducer
        self._step = step
        self._exchanges_at_step = reducer.exchanges

    def __call__(self, closure: Closure | None = None, **kwargs: Any) -> Any:
        """Step; each call of `closure` is followed by an exchange."""
        if closure is not None:
            return self._step(self._optimizer, self._averaging(closure), **kwargs)
        self._average_for_step()
        return self._step(self._optimizer, None, **kwargs)

    def average_if_due(self) -> None:
        """Average what has come since the last exchange, and where there was none since the last
        step, whatever other ranks may have."""
        none_since_last_step = self._reducer.exchanges == self._exchanges_at_step
        if self._reducer.unsynchronized or none_since_last_step:
            self._reducer.synchronize()

    def forget_averages(self) -> None:
        """Have the next step need others: those so far are used up, or thrown away."""
        self._exchanges_at_step = self._reducer.exchanges

    def _average_for_step(self) -> None:
        self.average_if_due()
        self.forget_averages()
        self._reducer.stepped()

    def _averaging(self, closure: Closure) -> Closure:
        @torch.enable_grad()
        def evaluate() -> Any:
            loss = closure()
            self._average_for_step()
            return loss

        return evaluate
