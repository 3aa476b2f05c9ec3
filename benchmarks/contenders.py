"""The ways to exchange gradients that are compared: one row of `CONTENDERS` each.

A row turns a plain module into a `Stepper`; all use the same optimizer, plain SGD, so that a step
is as much exchange and as little update as possible.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_mgwfbp import MergedOptimizer, PowerSGD, TopK


@dataclass(frozen=True)
class Stepper:
    """A contender at work on one model; `merge_groups()` counts its plan's, None without one."""

    module: nn.Module
    optimizer: Optimizer
    merge_groups: Callable[[], int | None] = lambda: None

    def step(self, inputs: tuple[Tensor, ...]) -> None:
        """One training step, gradients averaged over all ranks before the update."""
        self.module(*inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Contender:
    """One row: `build` makes its stepper on a module that is the same on all ranks."""

    name: str
    what: str
    build: Callable[[nn.Module], Stepper]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.01)


def compute(module: nn.Module) -> Stepper:
    return Stepper(module, sgd(module))


def ddp(module: nn.Module) -> Stepper:
    return Stepper(DistributedDataParallel(module), sgd(module))


def merged(**options: Any) -> Callable[[nn.Module], Stepper]:
    """A row's `build` for `MergedOptimizer(..., **options)`."""

    def build(module: nn.Module) -> Stepper:
        optimizer = MergedOptimizer(
            sgd(module), module.named_parameters(), warmup_steps=5, **options
        )
        return Stepper(
            module, optimizer, lambda: len(optimizer.plan.groups) if optimizer.plan else None
        )

    return build


CONTENDERS = {
    row.name: row
    for row in (
        Contender("compute", "no exchange: the bound", compute),
        Contender("ddp", "DistributedDataParallel as it comes", ddp),
        Contender("per_tensor", "one message per tensor (WFBP)", merged(planner="wfbp")),
        Contender("single", "one message after backward", merged(planner="single")),
        Contender("mgwfbp", "the published greedy plan", merged(planner="mgwfbp")),
        Contender("optimal", "the exact plan", merged(planner="optimal")),
        Contender(
            "bf16", "the exact plan, bf16 wire", merged(planner="optimal", compressor="bf16")
        ),
        Contender("topk", "1 % of the elements", merged(compressor=TopK(density=0.01))),
        Contender("int8", "8-bit block floating point", merged(compressor="int8")),
        Contender("powersgd", "factors of rank 4", merged(compressor=PowerSGD(rank=4))),
    )
}
