"""The ways to exchange gradients that are compared: one row of `CONTENDERS` each.

A row turns a plain module into a `Stepper`; all use the same optimizer, plain SGD, so that a step
is as much exchange and as little update as possible.

Horovod takes its settings when it starts, and its thread costs CPU as long as it runs. So it runs
only while a row that needs it is at work, and is started anew, as that row wants it, each time.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from lightning_mgwfbp import MergedOptimizer, PowerSGD, TopK
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod, start_horovod, stop_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport


@dataclass(frozen=True)
class Stepper:
    """A contender at work on one model; `merge_groups()` counts its plan's, None without one.

    `settle()` completes what the last step has left to the next one.
    """

    module: nn.Module
    optimizer: Optimizer
    merge_groups: Callable[[], int | None] = lambda: None
    settle: Callable[[], None] = lambda: None

    def step(self, inputs: tuple[Tensor, ...]) -> None:
        """One training step, gradients averaged over all ranks before the update."""
        self.module(*inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass(frozen=True)
class Contender:
    """One row: `build` makes its stepper on a module that is the same on all ranks.

    Args:
        horovod: runs Horovod as this row wants it; None for a row that needs none.
    """

    name: str
    what: str
    build: Callable[[nn.Module], Stepper]
    horovod: Callable[[], AbstractContextManager[None]] | None = None

    def running(self) -> AbstractContextManager[None]:
        """Within, the row can be built and stepped. Collective."""
        return self.horovod() if self.horovod else nullcontext()

    def check(self) -> None:
        """Raise ValueError for a row that cannot run in this environment, saying why."""
        if self.horovod is None:
            return
        try:
            load_horovod()
        except ModuleNotFoundError as error:
            raise ValueError(f"The contender {self.name!r} needs Horovod: {error}") from error
        for variable in ("HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"):
            if variable in os.environ:
                raise ValueError(
                    f"The contender {self.name!r} starts Horovod with settings of its own, got"
                    f" {variable}={os.environ[variable]} in the environment: unset it."
                )


@contextmanager
def horovod_unfused() -> Iterator[None]:
    """Horovod as the package starts it."""
    start_horovod(TorchTransport.world())
    try:
        yield
    finally:
        stop_horovod()


@contextmanager
def horovod_fused() -> Iterator[None]:
    """Horovod with its own default: what comes in a cycle is one message, up to 128 MiB."""
    os.environ["HOROVOD_FUSION_THRESHOLD"] = str(128 << 20)
    try:
        with horovod_unfused():
            yield
    finally:
        del os.environ["HOROVOD_FUSION_THRESHOLD"]


def sgd(module: nn.Module) -> Optimizer:
    return SGD(module.parameters(), lr=0.01)


def compute(module: nn.Module) -> Stepper:
    return Stepper(module, sgd(module))


def ddp(module: nn.Module) -> Stepper:
    return Stepper(DistributedDataParallel(module), sgd(module))


def distributed_optimizer(module: nn.Module) -> Stepper:
    optimizer = load_horovod().DistributedOptimizer(sgd(module), module.named_parameters())
    return Stepper(module, optimizer)


def merged(
    transport: Callable[[], Transport] = TorchTransport, **options: Any
) -> Callable[[nn.Module], Stepper]:
    """A row's `build` for `MergedOptimizer(..., **options)`."""

    def build(module: nn.Module) -> Stepper:
        optimizer = MergedOptimizer(
            sgd(module),
            module.named_parameters(),
            transport=transport(),
            warmup_steps=5,
            module=module,
            **options,
        )
        return Stepper(
            module,
            optimizer,
            lambda: len(optimizer.plan.groups) if optimizer.plan else None,
            optimizer.flush,
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
        Contender(
            "cross", "the optimizer steps in the next forward", merged(schedule="cross_iteration")
        ),
        Contender("topk", "1 % of the elements", merged(compressor=TopK(density=0.01))),
        Contender("int8", "8-bit block floating point", merged(compressor="int8")),
        Contender("powersgd", "factors of rank 4", merged(compressor=PowerSGD(rank=4))),
        Contender(
            "horovod",
            "Horovod's DistributedOptimizer as it comes",
            distributed_optimizer,
            horovod_fused,
        ),
        Contender(
            "over_horovod",
            "the exact plan, carried by Horovod",
            merged(HorovodTransport, planner="optimal"),
            horovod_unfused,
        ),
        Contender(
            "cross_over_horovod",
            "cross, carried by Horovod",
            merged(HorovodTransport, schedule="cross_iteration"),
            horovod_unfused,
        ),
    )
}
