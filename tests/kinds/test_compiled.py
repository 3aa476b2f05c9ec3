"""A failure here means: compiled or scripted code is not trained as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cross_traps import Layers
from kinds import ALL, Kind, assert_equal_to_oracle
from ranks import discard_pool
from torch import nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*has no effect. The schedule is"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
]


@pytest.fixture(scope="module", autouse=True)
def ranks_of_their_own() -> Any:
    """Where anything is scripted or compiled nothing is deferred any more."""
    yield
    discard_pool()


class Scripted(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b = torch.jit.script(self.b)


class Submodule(Layers):
    """One layer by the default backend, another by one that splits graphs from Python."""

    def __init__(self) -> None:
        super().__init__()
        self.b = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        self.c.compile(backend="aot_eager")


class InPlace(Layers):
    """All of a LightningModule's forward, compiled when the strategy is there."""

    def forward(self, x: Any) -> Any:
        return Layers.loss(self, x, 0)

    def loss(self, x: Any, step: int) -> Any:
        return self(x)

    def configure_model(self) -> None:
        self.compile(backend="aot_eager")


def whole() -> Any:
    """A LightningModule as Lightning's documentation compiles it."""
    return torch.compile(Layers(), backend="aot_eager")


MODELS: dict[str, Any] = {
    "scripted": Scripted,
    "submodule": Submodule,
    "in place": InPlace,
    "whole": whole,
}


@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS)
def test_code_that_nobody_sees(module: Any) -> None:
    """Hooks on parameters in compiled backward; wrapped names; weights that are late."""
    assert_equal_to_oracle(Kind(module, strategies=ALL, defers=False))
