"""A failure here means: a network cannot be exported or copied in some hook of its training."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cross_traps import Layers
from kinds import ALL, AVERAGING, Kind, assert_equal_to_oracle
from ranks import discard_pool
from torch import Tensor, nn

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated"),
]
X = torch.ones(2, 8)


@pytest.fixture(scope="module", autouse=True)
def ranks_of_their_own() -> Any:
    """Where anything is scripted nothing is deferred any more."""
    yield
    discard_pool()


def trace(net: nn.Module) -> Any:
    return torch.jit.trace(net, X)


def script(net: nn.Module) -> Any:
    return torch.jit.script(net)


def export(net: nn.Module) -> Any:
    return torch.export.export(net, (X,)).module()


def pickled(net: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(net))


Way = Callable[[nn.Module], Any]
UNSCRIPTED: tuple[Way, ...] = (export, torch.fx.symbolic_trace, copy.deepcopy, pickled)
EVERY: tuple[Way, ...] = (*UNSCRIPTED, trace, script)


def try_all(module: Exporting, ways: Sequence[Way]) -> None:
    with torch.no_grad():
        for way in ways:
            result = way(module.net)(X)
            module.seen += [way.__name__, result, torch.equal(result, module.net(X))]
            assert module.seen[-1], f"{way.__name__} is not the network"


class Exporting(Layers):
    """A network that each of `ways` takes before it is used in a step, and at validation."""

    def __init__(self, ways: Sequence[Way]) -> None:
        super().__init__()
        self.ways = ways
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss(self, x: Tensor, step: int) -> Tensor:
        before = self.d(x)
        try_all(self, self.ways)
        return super().loss(self.net(before), step)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def on_validation_epoch_end(self) -> None:
        try_all(self, self.ways)


class Everywhere(pl.Callback):
    """Does the same between forward and backward, with gradients, and after a step."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        try_all(pl_module, pl_module.ways)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        try_all(pl_module, pl_module.ways)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        try_all(pl_module, pl_module.ways)


VALIDATED = {"limit_val_batches": 1, "val_check_interval": 3}
KINDS: dict[str, Kind] = {
    "deferred": Kind(partial(Exporting, UNSCRIPTED), VALIDATED, strategies=ALL),
    "everywhere": Kind(
        partial(Exporting, UNSCRIPTED), callbacks=(Everywhere,), strategies=AVERAGING
    ),
    "scripted": Kind(partial(Exporting, EVERY), VALIDATED, strategies=ALL, defers=False),
    "scripted everywhere": Kind(
        partial(Exporting, (trace, script)), callbacks=(Everywhere,), strategies=AVERAGING
    ),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_in_any_hook(kind: Kind) -> None:
    """What watches modules is in the way; an export that changes training, or is not its time's."""
    assert_equal_to_oracle(kind)
