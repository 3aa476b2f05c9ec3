"""A failure here means: a Trainer that does not go with deferred steps is not refused by name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from ranks import discard_pool, train_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel
from training import Toy, ToyData, make_strategy, quiet_trainer

from lightning_mgwfbp import MergedOptimizer, TopK, WarmupCallback
from lightning_mgwfbp.exchange.compressors import COMPRESSORS, Cast
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.schedules import (
    against_cross_iteration,
    agree_on_schedule,
    what_would_see,
)


class Manual(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class AfterBackward(Toy):
    def on_after_backward(self) -> None:
        pass


class Clipping(Toy):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        pass


class GradientLogger(pl.Callback):
    def on_before_optimizer_step(self, *_: Any) -> None:
        pass


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        return None if closure is None else closure()


class OwnAdam(torch.optim.Adam):
    """A subclass that leaves step() as it is."""


def trainer_of(module: pl.LightningModule, optimizer: Any = None, **kwargs: Any) -> pl.Trainer:
    """A Trainer as the strategy finds it in its setup."""
    trainer = quiet_trainer(**{"devices": 1, **kwargs})
    trainer.strategy.connect(module)
    trainer.strategy.optimizers = [optimizer or torch.optim.SGD(module.parameters(), lr=0.1)]
    return trainer


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2))]


CASES = {
    "clip": (lambda: trainer_of(Toy(), gradient_clip_val=1.0), "Trainer(gradient_clip_val=1.0)"),
    "manual": (lambda: trainer_of(Manual()), "Manual optimizes manually"),
    "after_backward": (lambda: trainer_of(AfterBackward()), "AfterBackward.on_after_backward"),
    "own_clipping": (lambda: trainer_of(Clipping()), "Clipping.configure_gradient_clipping"),
    "callback": (
        lambda: trainer_of(Toy(), callbacks=[GradientLogger()]),
        "GradientLogger.on_before_optimizer_step",
    ),
    "lbfgs": (lambda: trainer_of(Toy(), torch.optim.LBFGS(parameters())), "LBFGS is not known"),
    "unknown": (lambda: trainer_of(Toy(), Lion(parameters())), "Lion is not known"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_deferred_is_named(case: str) -> None:
    """A combination that would be silently wrong."""
    make_trainer, words = CASES[case]
    assert words in str(against_cross_iteration(make_trainer(), None))


def test_a_sparse_compressor_is_named() -> None:
    """Residuals would be kept of gradients that nobody has averaged."""
    assert "TopK" in str(against_cross_iteration(trainer_of(Toy()), TopK()))
    by_name = str(against_cross_iteration(trainer_of(Toy()), COMPRESSORS["topk"]))
    assert by_name.startswith("`compressor='topk'` does not send")
    assert against_cross_iteration(trainer_of(Toy()), Cast("bfloat16")) is None


@pytest.mark.parametrize(
    "optimizer",
    [torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adafactor, OwnAdam],
)
def test_optimizers_that_step_per_parameter_are_taken(optimizer: Any) -> None:
    """One of torch's own is refused; each has stepped before, which changes its class."""
    made = optimizer(parameters(), lr=0.1)
    made.step()
    assert against_cross_iteration(trainer_of(Toy(), made), None) is None


def test_lightnings_own_callbacks_do_not_look_at_weights() -> None:
    """Nobody would ever hide anything behind the next forward."""
    quiet = [
        callbacks.ModelCheckpoint(every_n_train_steps=1),
        callbacks.TQDMProgressBar(),
        callbacks.Timer(),
        WarmupCallback(),
    ]
    trainer = trainer_of(
        Toy(), callbacks=quiet, enable_checkpointing=True, enable_progress_bar=True
    )
    assert what_would_see(trainer) is None


class Watcher(pl.Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        pass


class OwnStep(Toy):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)


def test_who_may_look_is_found() -> None:
    """An average of weights is taken before the update."""
    averaging = callbacks.WeightAveraging(avg_fn=AveragedModel)
    for trainer, words in (
        (trainer_of(Toy(), callbacks=[Watcher()]), "Watcher.on_train_batch_start"),
        (trainer_of(Toy(), callbacks=[averaging]), "WeightAveraging.on_train_batch_end"),
        (trainer_of(OwnStep()), "OwnStep.optimizer_step"),
    ):
        assert words in str(what_would_see(trainer))


class OnCuda(nn.Parameter):
    """A parameter that says it lies on a GPU."""

    device = torch.device("cuda", 1)


def test_a_parameter_on_cuda_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Updates are made of averages that have not arrived, silently."""
    optimizer = torch.optim.SGD([OnCuda(torch.zeros(2))], lr=0.1)
    trainer, alone = trainer_of(Toy(), optimizer), LoopbackTransport.solo()
    words = "the parameters lie on cuda:1, and updates deferred into the next forward are not order"
    with pytest.raises(ValueError, match=words):
        agree_on_schedule(trainer, "cross_iteration", None, alone)
    with pytest.raises(ValueError, match=words):
        MergedOptimizer(
            optimizer,
            [("weight", optimizer.param_groups[0]["params"][0])],
            transport=alone,
            schedule="cross_iteration",
            module=nn.Identity(),
        )
    with caplog.at_level("INFO"):
        assert agree_on_schedule(trainer, "auto", None, alone) == "backward"
    assert words in caplog.text


class Steps(pl.Callback):
    """Keeps the classes of the strategy's steps."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        (step,) = trainer.strategy._steps.values()
        self.kind = type(step).__name__


def fit(rank: int, schedule: str, watched_on: int) -> str:
    """The kind of step, or the error, where one rank only has something against deferring."""
    strategy = make_strategy("mgwfbp", schedule=schedule, warmup_steps=1)
    steps = Steps()
    watching = [GradientLogger()] if rank == watched_on else []
    trainer = quiet_trainer(strategy=strategy, max_steps=3, callbacks=[steps, *watching])
    try:
        trainer.fit(Toy(), ToyData())
    except ValueError as error:
        return str(error)
    return steps.kind


@pytest.fixture(scope="module")
def fresh_ranks() -> None:
    """In which nothing that was scripted or compiled keeps updates from being late."""
    discard_pool()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_ranks")
def test_all_ranks_refuse_what_one_has() -> None:
    """One rank raises, and the others wait for it."""
    for error in train_ranks(fit, "cross_iteration", 1):
        assert "GradientLogger.on_before_optimizer_step" in error
        assert 'Use `schedule="backward"`' in error


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_ranks")
def test_auto_falls_back_on_all_ranks() -> None:
    """Ranks exchange by different schedules, or "auto" refuses."""
    assert train_ranks(fit, "auto", 1) == ["AveragedStep"] * 2
    assert train_ranks(fit, "auto", -1) == ["DeferredStep"] * 2


def test_an_unknown_schedule() -> None:
    """A misspelt option is ignored."""
    with pytest.raises(ValueError, match=r"`schedule=...` must be one of backward, cross_iter"):
        make_strategy("mgwfbp", schedule="crossiteration")
