"""A failure here means: something in a Trainer's life meets an update that is not complete."""

from __future__ import annotations

import copy
import io
import signal
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cross_traps import (
    DDP,
    OURS,
    Layers,
    Run,
    Trap,
    assert_equal_to_oracle,
    fit,
    loader,
    strategy_of,
)
from lightning.pytorch import callbacks
from ranks import train_ranks
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from training import assert_same, quiet_trainer

from lightning_mgwfbp import MGWFBP, Threshold

pytestmark = pytest.mark.slow

WATCHED = "ignore:.*has no effect. The schedule is"


class Validated(Layers):
    """Losses on validation batches, which weights must be complete for."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(Layers.loss(self, batch[0].to(self.dtype), 0).clone())


class Late(Validated):
    """A layer whose optimizer state begins in an update that validation completes."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        return super().loss(x, step) if step >= 2 else self.a(x).square().mean()


class Normalised(Trap):
    """BatchNorm, for which SWA trains an epoch without backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def loss(self, x: Tensor, step: int) -> Tensor:
        return self.net(x).square().mean()


class Descending(Layers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class OwnAverage(Layers):
    """Averages its weights right after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(nn.ModuleList([self.a, self.b]))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.average.update_parameters(nn.ModuleList([self.a, self.b]))


class Looker(pl.Callback):
    """Sees weights and gradients at the hooks in which nothing is deferred."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.seen += [pl_module.a.weight.sum().item(), pl_module.d.weight.grad.sum().item()]


class EpochLooker(pl.Callback):
    """Sees them between epochs, in every way."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        buffer = io.BytesIO()
        torch.save(pl_module.d, buffer)
        buffer.seek(0)
        pl_module.seen += [
            copy.deepcopy(pl_module).d.weight.detach().clone(),
            torch.load(buffer, weights_only=False).weight.detach().clone(),
            pl_module.d.weight.detach().clone(),
        ]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen.append(pl_module.d.weight.detach().clone())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.seen.append(pl_module.a.weight.detach().clone())


def halfway(average: Tensor, weight: Tensor, _: Any) -> Tensor:
    return average + (weight - average) / 2


SWA = partial(callbacks.StochasticWeightAveraging, 0.05, 2)
EPOCHS = {"limit_train_batches": 5, "max_epochs": 3, "max_steps": -1}
VALIDATED = {"limit_val_batches": 2, "val_check_interval": 2, **EPOCHS}
RUNS = {
    "accumulated": Run(Layers, {**EPOCHS, "accumulate_grad_batches": 3}),
    "scheduled accumulation": Run(
        Layers, EPOCHS, (partial(callbacks.GradientAccumulationScheduler, {0: 1, 1: 2, 2: 4}),)
    ),
    "validated": Run(Validated, VALIDATED, (EpochLooker,)),
    "late state": Run(Late, VALIDATED),
    "swa": Run(Layers, {**EPOCHS, "max_epochs": 5}, (SWA,)),
    "bf16-mixed": Run(Layers, {"precision": "bf16-mixed"}),
    "bf16-true": Run(Layers, {"precision": "bf16-true"}),
    "16-true": Run(Descending, {"precision": "16-true"}),
    "64-true": Run(Validated, {"precision": "64-true", **VALIDATED}),
    "replanned": Run(Layers, {"max_steps": 14}, strategy={"replan_every_n_steps": 3}),
    "single": Run(Layers, strategy={"planner": "single"}),
    "threshold": Run(Layers, strategy={"planner": Threshold(nbytes=300)}),
    "mgwfbp": Run(Layers, strategy={"planner": MGWFBP()}),
    "auto": Run(Layers, strategy={"planner": "auto"}),
    "static": Run(Layers, strategy={"static_graph": True}),
    "bf16 on the wire": Run(Layers, strategy={"compressor": "bf16"}, oracle="mgwfbp"),
}
WATCHING = {
    "swa with batch norm": Run(Normalised, {**EPOCHS, "max_epochs": 5}, (SWA,), defers=False),
    "own average": Run(OwnAverage, defers=False),
    "looker": Run(Layers, callbacks=(Looker,), defers=False),
    "weight averaging": Run(
        Layers,
        callbacks=(partial(callbacks.WeightAveraging, avg_fn=halfway),),
        defers=False,
    ),
}


def test_whoever_looks_finds_complete_weights() -> None:
    """Flush points; the averages' dtype; plans."""
    assert_equal_to_oracle(RUNS)


@pytest.mark.filterwarnings(WATCHED)
def test_who_looks_after_each_step() -> None:
    """A watcher's weights, and the gradients beside them."""
    assert_equal_to_oracle(WATCHING)


def _checkpoints(rank: int, folder: str) -> list[Any]:
    """Train on, from what a callback saved in the middle, by each strategy from each one's."""
    run, ends = Run(Validated), []
    for saver in (OURS, DDP):
        saving = partial(
            callbacks.ModelCheckpoint,
            f"{folder}/{saver}",
            "{step}",
            every_n_train_steps=3,
            save_top_k=-1,
        )
        fit(
            replace(run, callbacks=(saving,)),
            saver,
            enable_checkpointing=True,
        )
        saved = f"{folder}/{saver}/step=6.ckpt"
        ends += [fit(run, name, max_steps=12, ckpt_path=saved) for name in (OURS, DDP)]
    return ends


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch")
@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_checkpoints_of_the_middle(tmp_path: Path) -> None:
    """Written every few steps, and resumed by either strategy."""
    for first, *others in train_ranks(_checkpoints, str(tmp_path)):
        for other in others:
            assert_same(first["weights"], other["weights"])
            assert_same(first["moments"], other["moments"])
    for step in (3, 6):
        ours, theirs = (
            torch.load(tmp_path / name / f"step={step}.ckpt", weights_only=True)
            for name in (OURS, DDP)
        )
        assert_same(ours["state_dict"], theirs["state_dict"])


class Raising(Layers):
    """Raises in a step, after a use of some weights; on both ranks."""

    raises: type[BaseException] | None = ValueError

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step == 4 and self.raises is not None:
            self.a(x)
            raise self.raises("in the middle")
        return super().loss(x, step)


def _raise_and_fit_again(rank: int) -> list[dict[str, Tensor]]:
    states = []
    for strategy in (OURS, DDP):
        pl.seed_everything(7, verbose=False)
        module = Raising()
        for end in (ValueError, KeyboardInterrupt, None):
            module.raises = end
            trainer = quiet_trainer(strategy=strategy_of(strategy), max_steps=6)
            with pytest.raises((ValueError, SystemExit)) if end else nullcontext():
                trainer.fit(module, loader())
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which Lightning has taken
            states.append({k: v.clone() for k, v in module.state_dict().items()})
            assert not any("all-gathers" in t.name for t in threading.enumerate())
    return states


def test_an_exception_leaves_complete_weights() -> None:
    """An error, Ctrl-C, and another fit in the same process."""
    for rank in train_ranks(_raise_and_fit_again):
        for ours, theirs in zip(rank[:3], rank[3:], strict=True):
            assert_same(ours, theirs)


def _refused(rank: int) -> str:
    class KeepsGradients(Layers):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    with pytest.raises(ValueError, match=r"KeepsGradients\.optimizer_zero_grad` may keep") as error:
        fit(Run(KeepsGradients), OURS)
    return str(error.value)


def test_kept_gradients_are_refused() -> None:
    """Gradients that the user wants to add to."""
    train_ranks(_refused)


def _three(rank: int) -> list[dict[str, Tensor]]:
    return [fit(Run(Validated), strategy, devices=3)["weights"] for strategy in (OURS, DDP)]


def test_three_ranks_end_alike() -> None:
    """Sums in an order of each rank's own."""
    ranks = train_ranks(_three, world_size=3)
    for ours, theirs in ranks:
        assert_same(ours, ranks[0][0])
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-5)
