"""Trainings on whole numbers, whose sums are exact, so that nothing may be lost, not even a bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from engine_examples import lasting
from torch import Tensor, nn

from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.compressed import CompressedExchanger
from lightning_mgwfbp.exchange.compressors import Compressor
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending
from lightning_mgwfbp.plan import MergePlan

SHAPES = {
    "scalar": (),
    "empty": (0, 3),
    "small": (5, 3),
    "filters": (2, 3, 3, 3),
    "matrix": (40, 3),
    "large": (300, 3),
}
NAMES = tuple(SHAPES)
EXACT_BELOW = 20  # scalar, empty and small travel exactly

Named = Mapping[str, Tensor]


def plan_of_sizes(*sizes: int, names: Sequence[str] = NAMES[::-1]) -> MergePlan:
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return MergePlan(tuple(names), tuple(pairwise(bounds)))


PLANS = (
    plan_of_sizes(6),
    plan_of_sizes(1, 2, 3),
    plan_of_sizes(2, 1, 1, 2),
    plan_of_sizes(*[1] * 6),
)


class Others(LoopbackTransport):
    """One rank, and others that send zeros: its averages are what it sent, over their number."""

    def __init__(self, world_size: int = 2) -> None:
        super().__init__(LoopbackTransport.solo()._hub, 0)
        self.world_size = world_size

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        output.zero_()[0] = buffer
        return SimpleNamespace(wait=lambda: None)

    def all_gather_object(self, value: Any, *, key: str) -> list[Any]:
        return [value] * self.world_size


class Parts(nn.Module):
    """Parameters that are zero, with gradients as they are given to `loss`."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, shapes: Mapping[str, tuple[int, ...]] = SHAPES
    ) -> None:
        super().__init__()
        for name, shape in shapes.items():
            data = torch.zeros(shape, dtype=dtype)
            if len(shape) == 4:
                data = data.contiguous(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(data))

    def loss(self, gradients: Named) -> Tensor:
        named = dict(self.named_parameters())
        # of a complex product the real part; the gradient is the conjugate of what it is with
        return torch.stack(
            [(named[n] * g.conj()).sum().real.double() for n, g in gradients.items()]
        ).sum()


@dataclass(frozen=True)
class Backward:
    used: tuple[tuple[str, ...], ...]  # (ranks,)
    no_sync: bool = False


@dataclass(frozen=True)
class Step:
    """Backwards, without an exchange between them, and one exchange."""

    backwards: tuple[Backward, ...]
    before: str = ""  # "resume", or a plan's number to "install"
    frozen: str = ""
    poisoned: int = -1  # a rank, whose gradients are not finite
    zero_grad: str = "to none"  # "to zero" or "keep"


def random_step(choose: Callable[[Sequence[Any]], Any], world_size: int) -> Step:
    """A step of what `choose`, such as `random.choice`, takes of each sequence."""

    def backward() -> Backward:
        used = tuple(
            tuple(n for n in NAMES if choose((True, True, True, False))) for _ in range(world_size)
        )
        return Backward(used, choose((False, False, True)))

    return Step(
        tuple(backward() for _ in range(choose((1, 1, 2, 3)))),
        before=choose(("", "", "", "resume", *map(str, range(len(PLANS))))),
        frozen=choose(("", "", "", *NAMES)),
        poisoned=choose((*[-1] * 6, *range(world_size))),
        zero_grad=choose(("to none", "to zero", "keep")),
    )


class Training:
    """One rank's; what it was given, what it received and what it has left are kept by name."""

    def __init__(
        self,
        transport: LoopbackTransport,
        compressor: Compressor,
        states: list[dict[str, Any]] | None = None,
    ) -> None:
        self.transport = transport
        self.compressor = compressor
        self.model = Parts()
        self.generator = torch.Generator().manual_seed(transport.rank)
        self.given = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.received = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self._connect(PLANS[1], states)

    @property
    def left(self) -> Named:
        return self.exchanger.state_dict().get("residual", {})

    def run(self, steps: Sequence[Step]) -> Training:
        for step in steps:
            self.step(step)
        self.reducer.close()
        return self

    def step(self, step: Step) -> None:
        if step.before == "resume":
            states = self.transport.all_gather_object(self.exchanger.state_dict(), key="resume")
            plan = self.reducer.plan
            self.reducer.close()
            self._connect(plan, states)
        elif step.before:
            self.reducer.install(PLANS[int(step.before)])
        frozen = getattr(self.model, step.frozen, nn.Parameter())
        frozen.requires_grad_(False)
        before, left = self._gradients(), self.left
        versions = {n: _version(p.grad) for n, p in self.model.named_parameters()}
        given = []
        again = {n for n, v in versions.items() if v is not None and step.before == "resume"}
        for each in step.backwards:
            given.append(self._backward(each, poisoned=step.poisoned))
            for n, p in self.model.named_parameters():
                if versions[n] is not None and _is_written(p.grad, *versions[n]):
                    again.add(n)
        # What was added to an average under no_sync makes all of it new, and a new reducer knows of
        # no average. Other ranks, which would send theirs, too, send zeros if there are none.
        absent = self.transport.world_size - 1 if isinstance(self.transport, Others) else 0
        self.reducer.synchronize()
        self.reducer.stepped()
        after = self._gradients()
        frozen.requires_grad_(True)
        if step.poisoned >= 0 and any(b.used[step.poisoned] for b in step.backwards):
            assert not all(g.isfinite().all() for g in after.values())
            assert_same(
                self.left, {n: left.get(n, torch.zeros_like(r)) for n, r in self.left.items()}
            )
            self.model.zero_grad()
            return
        for n in NAMES:
            self.given[n] = self.given[n] + sum(g[n] for g in given if n in g)
            if n in again:
                self.given[n] = self.given[n] - absent * before[n]
            self.received[n] = self.received[n] + after[n] - before[n]
        if step.zero_grad != "keep":
            self.model.zero_grad(set_to_none=step.zero_grad == "to none")

    def _connect(self, plan: MergePlan, states: list[dict[str, Any]] | None = None) -> None:
        self.exchanger = CompressedExchanger(self.transport, self.compressor)
        self.reducer = Reducer(lasting(self.model.named_parameters()), self.exchanger)
        if states is not None:
            self.exchanger.load_state_dict(states)
        self.reducer.install(plan)

    def _backward(self, backward: Backward, poisoned: int) -> Named:
        given = {
            n: torch.randint(-999, 999, SHAPES[n], generator=self.generator).double()
            for n in backward.used[self.transport.rank]
            if getattr(self.model, n).requires_grad
        }
        if poisoned == self.transport.rank:
            given = {n: g + torch.inf for n, g in given.items()}
        with self.reducer.no_sync() if backward.no_sync else self.reducer.armed():
            if given:
                self.model.loss(given).backward()
        return given

    def _gradients(self) -> Named:
        named = self.model.named_parameters()
        return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def _version(gradient: Tensor | None) -> tuple[Tensor, int] | None:
    return None if gradient is None else (gradient, gradient._version)


def _is_written(gradient: Tensor | None, before: Tensor, version: int) -> bool:
    return gradient is before and gradient._version != version


def assert_same(ours: Named, theirs: Named) -> None:
    """Every number is the same; 0.0 and -0.0 are."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
