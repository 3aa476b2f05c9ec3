"""A failure here means: an optimizer, a scheduler or a hook does not see what it sees under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers
from kinds import AVERAGING, BACKWARD, HOROVOD, Kind, assert_equal_to_oracle
from lightning.pytorch import Callback, callbacks
from torch import Tensor, nn
from torch.optim import lr_scheduler, swa_utils

pytestmark = pytest.mark.slow


class Optimized(Layers):
    """Any optimizer, any scheduler."""

    def __init__(self, optimizer: Any, scheduler: Any = None) -> None:
        super().__init__()
        self.make, self.schedule = optimizer, scheduler

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        if self.schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}


class Sharpness(torch.optim.SGD):
    """Calls its closure twice, the second time at other weights (SAM)."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        closure()
        with torch.no_grad():
            before = [p.clone() for p in parameters]
            for p in parameters:
                p.add_(p.grad, alpha=0.05 / (1e-12 + p.grad.norm()))
        loss = closure()
        with torch.no_grad():
            for p, weight in zip(parameters, before, strict=True):
                p.copy_(weight)
        super().step()
        return loss


class OwnClipping(Layers):
    """Clips by a rule of its own."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.05 / (1 + self.global_step), "norm")


class Watching(Callback):
    """Sees gradients wherever a callback can."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._look(pl_module)

    def _look(self, pl_module: Any) -> None:
        pl_module.seen += [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]


class Hooked(Layers):
    """Hooks on parameters that scale, and see, this rank's own gradients."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(self._halve)

    def _halve(self, gradient: Tensor) -> Tensor:
        self.seen.append(gradient.clone())
        return gradient / 2


class Averaged(Layers):
    """An average of torch's own, and its schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.average = swa_utils.AveragedModel(
            nn.ModuleList([self.a, self.d]), multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)
        )

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update_parameters(nn.ModuleList([self.a, self.d]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [swa_utils.SWALR(optimizer, 0.01, anneal_epochs=2)]


def one_cycle(optimizer: Any) -> Any:
    return {"scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, 20), "interval": "step"}


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "foreach": partial(SGD, foreach=True),
    "fused": partial(torch.optim.Adam, lr=1e-2, fused=True),
    "for loop": partial(torch.optim.AdamW, lr=1e-2, foreach=False),
}
CLOSURES: dict[str, Any] = {
    "lbfgs": partial(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "sam": partial(Sharpness, lr=0.1),
}
EPOCHS = {"limit_train_batches": 3, "max_epochs": 5, "max_steps": -1}
AVERAGES: dict[str, Any] = {
    "swa": partial(callbacks.StochasticWeightAveraging, 0.05, 2),
    "ema": partial(callbacks.EMAWeightAveraging, decay=0.9),
}
CLIPPING: dict[str, Any] = {
    "norm": {"gradient_clip_val": 0.01},
    "value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers(optimizer: Any) -> None:
    """Updates that are made of many gradients at a time."""
    assert_equal_to_oracle(Kind(partial(Optimized, optimizer)))


@pytest.mark.parametrize("optimizer", CLOSURES.values(), ids=CLOSURES)
def test_closures_that_are_called_several_times(optimizer: Any) -> None:
    """An exchange for each call; LBFGS, whose calls depend on the loss, on which ranks differ."""
    assert_equal_to_oracle(Kind(partial(Optimized, optimizer), strategies=(BACKWARD, HOROVOD)))


def test_schedulers() -> None:
    """Learning rates that change with each step."""
    assert_equal_to_oracle(Kind(partial(Optimized, SGD, one_cycle)))


@pytest.mark.parametrize("trainer", CLIPPING.values(), ids=CLIPPING)
def test_clipping(trainer: Any) -> None:
    """Of averages, by the Trainer."""
    assert_equal_to_oracle(Kind(Layers, trainer, (Watching,), strategies=AVERAGING))


def test_clipping_of_ones_own() -> None:
    """Of averages, in a hook."""
    assert_equal_to_oracle(Kind(OwnClipping, strategies=AVERAGING))


def test_hooks_on_parameters() -> None:
    """They are called once for each backward, before gradients are sent."""
    assert_equal_to_oracle(Kind(Hooked))


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
def test_averaged_weights(average: Any) -> None:
    """Lightning's callbacks that average weights, and put the averages in their place."""
    module = partial(Optimized, SGD)
    assert_equal_to_oracle(Kind(module, EPOCHS, (average,), strategies=AVERAGING))


def test_an_average_of_torchs_own() -> None:
    """A copy of the model within the model."""
    assert_equal_to_oracle(Kind(Averaged, EPOCHS, strategies=AVERAGING))
