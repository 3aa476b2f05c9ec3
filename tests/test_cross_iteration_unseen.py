"""A failure here means: code that nobody can look into uses a weight before its update."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
from cross_traps import Layers, Run, assert_equal_to_oracle
from torch import Tensor, nn

pytestmark = pytest.mark.slow


class Scripted(Layers):
    """A scripted submodule, to which no hooks go."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.jit.script(self.a)


class CompiledModule(Layers):
    """A submodule that is compiled in place, after the beginning."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step == 3:
            self.c.compile(backend="eager")
        return super().loss(x, step)


def _between(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).tanh() @ weight


class Function(Layers):
    """A function that becomes compiled or scripted in a step, and is given a weight."""

    def __init__(self, make: Any, in_step: int) -> None:
        super().__init__()
        self.make, self.in_step = make, in_step
        self.between: Any = _between

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step == self.in_step:
            self.between = self.make(_between)
        # else TorchScript computes otherwise after some calls
        with torch.jit.optimized_execution(False):
            x = self.between(x, self.d.weight)
        return super().loss(x, step)


class Outside(Layers):
    """Another network's forward, where all of ours is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="eager")

    def loss(self, x: Tensor, step: int) -> Tensor:
        return super().loss(self.net(x), step)


COMPILED = {
    "whole": Run(
        partial(Function, partial(torch.compile, backend="eager", fullgraph=True), 3),
        oracle="mgwfbp",
    ),
    "broken": Run(
        partial(Function, partial(torch.compile, backend="aot_eager"), 3), oracle="mgwfbp"
    ),
    "in place": Run(CompiledModule, oracle="mgwfbp"),
}
SCRIPTED = {"function": Run(partial(Function, torch.jit.script, 0), defers=False, oracle="mgwfbp")}
IN_THE_MODEL = {
    "scripted": Run(Scripted, defers=False, oracle="mgwfbp"),
    "compiled": Run(Outside, defers=False, oracle="mgwfbp"),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code() -> None:
    """Weights are late, or torch.compile is made to trace what belongs to us."""
    assert_equal_to_oracle(COMPILED)


@pytest.mark.filterwarnings("ignore:.*has no effect. The schedule is")
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_scripted_code_and_parts_of_the_model() -> None:
    """What no mode and no hook sees."""
    try:
        assert_equal_to_oracle({**SCRIPTED, **IN_THE_MODEL})
    finally:
        # in processes in which scripted functions exist nothing is deferred any more
        ranks.discard_pool()
