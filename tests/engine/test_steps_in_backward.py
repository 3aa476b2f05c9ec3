"""A failure here means: a step on this rank's own gradient goes unnoticed, or another is blamed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import train_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook
from training import Toy, ToyData, make_strategy, quiet_trainer

from lightning_mgwfbp.engine.grouped_step import is_step_watched
from lightning_mgwfbp.engine.steps_in_backward import StepsInBackward


def step_in_hooks(
    model: nn.Module, make: Callable[..., Optimizer] = SGD
) -> dict[nn.Parameter, Optimizer]:
    """Step each parameter as soon as its gradient exists."""
    optimizers = {p: make([p], lr=0.1) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step)
    return optimizers


def backward(model: nn.Module, watch: StepsInBackward) -> None:
    with watch.watched():
        model(torch.ones(2, 3)).sum().backward()


def test_a_step_in_a_hook_is_named_once() -> None:
    """Ranks drift apart, silently, or each step of each batch says so."""
    model = nn.Linear(3, 2)
    step_in_hooks(model, Adam)
    watch = StepsInBackward(model.named_parameters())
    with pytest.warns(UserWarning, match=r"Adam steps '(weight|bias)' while backward .* Step aft"):
        backward(model, watch)
    backward(model, watch)  # a second warning is an error


def test_steps_that_are_right_are_left_alone() -> None:
    """A warning for what is not exchanged, has no gradient, or comes after backward."""
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    watch = StepsInBackward(model.named_parameters())
    step_in_hooks(other)
    backward(other, watch)
    idle = SGD(other.parameters(), lr=0.1)
    other.weight.register_hook(lambda _: idle.step())
    optimizer = SGD(model.parameters(), lr=0.1)
    other.bias.register_hook(lambda _: optimizer.step())  # of which none has a gradient
    backward(other, watch)
    with watch.watched():
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()


def test_nothing_stays_behind() -> None:
    """Every step would be taken whole, as if somebody had a hook on it."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    watch = StepsInBackward(model.named_parameters())
    with watch.watched():
        assert not is_step_watched(optimizer)
        handle = register_optimizer_step_pre_hook(lambda *_: None)
        assert is_step_watched(optimizer)
        handle.remove()
    with pytest.raises(ZeroDivisionError), watch.watched():
        raise ZeroDivisionError
    assert not _global_optimizer_pre_hooks


class InHooks(Toy):
    """Leaves its steps to hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        step_in_hooks(self)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(batch, batch_idx))


def fit(rank: int, in_hooks: bool) -> tuple[list[str], str]:
    """What was warned of, and the error in which training has ended."""
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        module: Any = InHooks() if in_hooks else Toy()
        strategy = make_strategy("mgwfbp", warmup_steps=1)
        trainer = quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=4)
        try:
            trainer.fit(module, ToyData())
        except RuntimeError as raised:
            error = str(raised)
    said = [str(w.message) for w in caught if "while backward runs" in str(w.message)]
    return said, error


@pytest.mark.slow
def test_two_ranks_that_drift_apart_are_told() -> None:
    """The strategy does not look, or looks at what Trainer steps."""
    (said, ours), (said_by_other, others) = train_ranks(fit, True)
    assert len(said) == 1
    assert said[0].startswith("SGD steps 'head.")
    assert not said_by_other
    assert ours == others
    assert ours.startswith("The ranks' weights differ")
    assert train_ranks(fit, False) == [([], ""), ([], "")]
