"""An optimizer's step taken in parts, each with the options of the moment when step() was called.

No optimizer is re-implemented: for each part its own `step` runs, while its param_groups hold that
part's parameters only. So it must be one whose update of a parameter looks at nothing but that
parameter, its gradient, its state and the options.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_mgwfbp.engine.steps_in_backward import StepsInBackward

# Read in torch's source: these loop over parameters and keep nothing per param_group.
_PER_PARAMETER = tuple(
    getattr(optim, name)
    for name in (
        "SGD",
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "Adamax",
        "NAdam",
        "RAdam",
        "ASGD",
        "Rprop",
        "Adafactor",
        "Muon",
    )
    if hasattr(optim, name)  # the last two are younger than torch 2.4
)


def why_not_in_parts(optimizer: Optimizer) -> str | None:
    """Say why `optimizer` must not be stepped in parts; None: it may be."""
    name = type(optimizer).__name__
    if optimizer.defaults.get("differentiable"):
        return f"`{name}(differentiable=True)` records its step"
    # torch wraps the step of each class at its first use
    step = inspect.unwrap(type(optimizer).step)
    if any(isinstance(optimizer, k) and step is inspect.unwrap(k.step) for k in _PER_PARAMETER):
        return None
    names = ", ".join(k.__name__ for k in _PER_PARAMETER)
    return (
        f"{name} is not known to update each parameter by itself (torch.optim's"
        f" {names} are, and subclasses that leave their step() as it is)"
    )


def is_step_watched(optimizer: Optimizer) -> bool:
    """Whether somebody wants to be called with each step, this optimizer's or any."""
    own_step = inspect.unwrap(type(optimizer).step)
    return any(
        (
            optimizer._optimizer_step_pre_hooks,
            optimizer._optimizer_step_post_hooks,
            any(not isinstance(h, StepsInBackward) for h in _global_optimizer_pre_hooks.values()),
            _global_optimizer_post_hooks,
            inspect.unwrap(optimizer.step) is not own_step,  # torch's schedulers leave a trace
        )
    )


class GroupedStep:
    """Steps `optimizer`, which must be one that can be, on some of its parameters at a time."""

    def __init__(self, optimizer: Optimizer) -> None:
        assert why_not_in_parts(optimizer) is None
        self.optimizer = optimizer
        # without what is around it: hooks, which have been called, or were not there yet
        self._step = inspect.unwrap(type(optimizer).step)
        self._options: list[dict[str, Any]] = []
        self._group_of: dict[int, int] = {}  # by the id of a parameter
        self._dtype = torch.get_default_dtype()

    def capture(self) -> None:
        """Take the options in force for those of the step that `step_on` will make in parts."""
        self._dtype = torch.get_default_dtype()
        groups = self.optimizer.param_groups
        self._options = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in groups
        ]
        self._group_of = {id(p): n for n, group in enumerate(groups) for p in group["params"]}
        # torch's schedulers look for it, and will be stepped before any part is
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step_on(self, parameters: Iterable[Tensor]) -> None:
        """Step those of `parameters` that the optimizer had when options were captured."""
        parts: dict[int, list[Tensor]] = {}
        device = "cpu"
        for parameter in parameters:
            number = self._group_of.get(id(parameter))
            if number is not None:
                parts.setdefault(number, []).append(parameter)
                device = parameter.device.type
        if not parts:
            return
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [
            {**self._options[number], "params": part} for number, part in parts.items()
        ]
        try:
            # a forward may have begun, with an autocast and a default dtype not for the step
            with torch.no_grad(), torch.autocast(device, enabled=False), _default(self._dtype):
                self._step(self.optimizer)
        finally:
            self.optimizer.param_groups = groups


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
