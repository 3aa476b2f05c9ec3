"""A failure here means: who takes part in a step changes, and training is not as it should be."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers
from kinds import ALL, AVERAGING, BACKWARD, BY_HAND, CROSS, HOROVOD, Kind, assert_equal_to_oracle
from lightning.pytorch import callbacks
from torch import Tensor, nn

pytestmark = pytest.mark.slow

EPOCHS = {"limit_train_batches": 3, "max_epochs": 5, "max_steps": -1}


class Finetuned(Layers):
    """A backbone that a callback freezes, and thaws later; BatchNorm in it stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def loss(self, x: Tensor, step: int) -> Tensor:
        return super().loss(self.backbone(x), step)

    def configure_optimizers(self) -> Any:
        trainable = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trainable, lr=0.1, momentum=0.9)


class Subset(Layers):
    """Parameters that no optimizer steps, though they have gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.a.parameters(), self.d.bias], lr=1e-2)


class Unconnected(Layers):
    """On one rank in turn the loss depends on no parameter, or on one only."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        if self.global_rank == step % 2:
            return self.d.bias.sum() if step % 4 == 3 else torch.zeros((), requires_grad=True)
        return super().loss(x, step)


class UnconnectedBackward(Unconnected):
    """The same, with a backward of one's own, of any kind."""

    def backward(self, loss: Tensor) -> None:
        if self.global_step % 2:
            torch.autograd.backward([loss])
        else:
            super().backward(loss)


class Broken(Layers):
    """A loss that is no number in one step, on one rank."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def loss(self, x: Tensor, step: int) -> Tensor:
        broken = step == 4 and self.global_rank == 1
        return super().loss(x, step) * (self.factor if broken else 1.0)


def test_a_backbone_that_is_frozen_and_thawed() -> None:
    """BackboneFinetuning; a param_group that is added later."""
    thaw = partial(callbacks.BackboneFinetuning, 2, backbone_initial_lr=0.05)
    kind = Kind(Finetuned, EPOCHS, (thaw,), oracle=BY_HAND)
    assert_equal_to_oracle(kind)


def test_an_optimizer_of_a_part() -> None:
    """Gradients that nobody steps on."""
    assert_equal_to_oracle(Kind(Subset))


@pytest.mark.parametrize("module", [Unconnected, UnconnectedBackward])
def test_a_loss_that_depends_on_nothing(module: Any) -> None:
    """A rank on which no hook fires."""
    strategies = ALL if module is Unconnected else AVERAGING
    assert_equal_to_oracle(Kind(module, {"max_steps": 9}, strategies=strategies, oracle=BY_HAND))


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number(factor: float) -> None:
    """It must be everybody's."""
    assert_equal_to_oracle(Kind(partial(Broken, factor), strategies=(BACKWARD, HOROVOD, CROSS)))


@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly=True.`")
def test_anomalies_are_looked_for() -> None:
    """Autograd in another mode."""
    assert_equal_to_oracle(Kind(Layers, {"detect_anomaly": True}))


ACCUMULATIONS: dict[str, Any] = {
    "partial window": ({**EPOCHS, "limit_train_batches": 5, "accumulate_grad_batches": 3}, ()),
    "by epoch": (
        {**EPOCHS, "limit_train_batches": 5},
        (partial(callbacks.GradientAccumulationScheduler, {0: 1, 1: 2, 3: 4}),),
    ),
}


@pytest.mark.parametrize(("trainer", "given"), ACCUMULATIONS.values(), ids=ACCUMULATIONS)
def test_accumulation(trainer: Any, given: Any) -> None:
    """A window that changes, or ends early."""
    assert_equal_to_oracle(Kind(Layers, trainer, given, strategies=AVERAGING))
