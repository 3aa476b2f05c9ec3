"""A failure here means: an optimizer stepped in parts is not the one stepped at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers, Run, assert_equal_to_oracle
from torch import Tensor, optim
from torch.optim import lr_scheduler

pytestmark = pytest.mark.slow


class Stepped(Layers):
    """Uses not all layers in each step, so that some parts have no gradients.

    Args:
        make: of parameters, their optimizer.
        schedule: of the optimizer, its scheduler.
        interval: of the scheduler.
    """

    def __init__(
        self, make: Callable[..., Any], schedule: Any = None, interval: str = "step"
    ) -> None:
        super().__init__()
        self.make, self.schedule, self.interval = make, schedule, interval

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step % 3:
            x = self.b(x).tanh()
        return self.d(self.c(self.a(x)).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self)
        if self.schedule is None:
            return optimizer
        scheduler = {"scheduler": self.schedule(optimizer), "interval": self.interval}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def of_all(kind: Any, **options: Any) -> Callable[[Layers], optim.Optimizer]:
    return partial(_of_all, kind, options)


def _of_all(kind: Any, options: dict[str, Any], module: Layers) -> optim.Optimizer:
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}
    return kind(module.parameters(), **options)


def of_groups(module: Layers) -> optim.Optimizer:
    """Options of each group's own, one group empty, some parameters in none."""
    groups = [
        {"params": []},
        {"params": module.c.parameters(), "lr": 0.01, "weight_decay": 0.5},
        {"params": [module.a.weight, module.b.bias], "momentum": 0.5, "nesterov": True},
    ]
    return optim.SGD(groups, lr=0.1)


def counted(module: Layers) -> optim.Optimizer:
    """With a hook, which must be called once, and see each step complete."""
    optimizer = of_all(optim.Adam)(module)
    optimizer.register_step_post_hook(lambda *_: module.seen.append(module.a.weight.sum().item()))
    return optimizer


def patched(module: Layers) -> optim.Optimizer:
    optimizer = of_all(optim.SGD, lr=0.1)(module)
    step = optimizer.step

    def counting(closure: Any = None) -> Any:
        module.seen.append("step")
        return step(closure)

    optimizer.step = counting  # type: ignore[method-assign]
    return optimizer


def one_cycle(optimizer: optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=20)


OPTIMIZERS = {
    "sgd": of_all(optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1, maximize=True),
    "sgd fused": of_all(optim.SGD, lr=0.1, weight_decay=0.1, fused=True),
    "adam": of_all(optim.Adam, amsgrad=True, weight_decay=0.1),
    "adam foreach": of_all(optim.Adam, foreach=True, maximize=True),
    "adam tensor": of_all(optim.Adam, lr=torch.tensor(0.01)),
    "adamw fused": of_all(optim.AdamW, fused=True),
    "rmsprop": of_all(optim.RMSprop, momentum=0.5, centered=True, foreach=True),
    "adagrad": of_all(optim.Adagrad, lr_decay=0.1),
    "adagrad fused": of_all(optim.Adagrad, fused=True),
    "adadelta": of_all(optim.Adadelta),
    "adamax": of_all(optim.Adamax),
    "nadam": of_all(optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "radam": of_all(optim.RAdam),
    "asgd": of_all(optim.ASGD, t0=3),
    "rprop": of_all(optim.Rprop),
    "adafactor": of_all(optim.Adafactor),
    "groups": of_groups,
}
SCHEDULES = {
    "one cycle": (one_cycle, "step"),
    "exponential": (partial(lr_scheduler.ExponentialLR, gamma=0.5), "step"),
    "per epoch": (partial(lr_scheduler.StepLR, step_size=1, gamma=0.5), "epoch"),
}
RUNS = {
    **{name: Run(partial(Stepped, make)) for name, make in OPTIMIZERS.items()},
    **{
        f"{kind} {name}": Run(
            partial(Stepped, OPTIMIZERS[kind], *how), {"limit_train_batches": 3, "max_steps": 11}
        )
        for name, how in SCHEDULES.items()
        for kind in ("sgd", "adam tensor")
    },
    "hooked": Run(partial(Stepped, counted), defers=False),
    "patched": Run(partial(Stepped, patched), defers=False),
}


def test_parts_make_a_step() -> None:
    """Options, states, or step counts of any optimizer."""
    assert_equal_to_oracle(RUNS)
