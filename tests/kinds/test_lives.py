"""A failure here means: what a process does between trainings is not as under DDP."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from cross_traps import DDP, Layers, loader
from kinds import ALL, AVERAGING, CROSS, HOROVOD, Kind, assert_equal_to_oracle, strategy_of
from lightning.pytorch.tuner import Tuner
from ranks import train_ranks
from torch import Tensor
from training import assert_same, quiet_trainer

pytestmark = pytest.mark.slow


def weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


class Staged(Layers):
    """Every stage of a Trainer, which sees the loss there."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(Layers.loss(self, batch[0], 0).detach().clone())

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.a(batch[0])


def _all_stages(rank: int, strategy: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    pl.seed_everything(7, verbose=False)
    module, data = Staged(), loader(count=32)
    limits = {f"limit_{stage}_batches": 2 for stage in ("val", "test", "predict")}
    trainer = quiet_trainer(
        strategy=strategy_of(strategy), max_epochs=1, use_distributed_sampler=False, **limits
    )
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    trainer.fit(module, data, data)
    trainer.test(module, data, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    trainer.predict(module, data, return_predictions=False)
    return weights(module), module.seen


@pytest.mark.parametrize("strategy", ALL)
def test_stages_before_and_between_fits(strategy: str) -> None:
    """A session that is there too early, or stays."""
    for ours, theirs in zip(
        train_ranks(_all_stages, strategy), train_ranks(_all_stages, DDP), strict=True
    ):
        assert_same(ours[0], theirs[0])
        assert len(ours[1]) == len(theirs[1]) == 10
        assert all(map(torch.equal, ours[1], theirs[1]))


def _one_after_another(rank: int, strategies: list[str]) -> dict[str, Tensor]:
    pl.seed_everything(7, verbose=False)
    module = Layers()
    for strategy in strategies:
        trainer = quiet_trainer(strategy=strategy_of(strategy), max_steps=4)
        trainer.fit(module, loader())
    return weights(module)


def test_strategies_one_after_another() -> None:
    """Hooks, threads or process groups of one Trainer in the next one's way."""
    mixed = [CROSS, DDP, *AVERAGING, DDP, HOROVOD, CROSS]
    ours = train_ranks(_one_after_another, mixed)
    theirs = train_ranks(_one_after_another, [DDP] * len(mixed))
    for rank, other in zip(ours, theirs, strict=True):
        assert_same(rank, other)


class Failing(Layers):
    """Raises once, in the middle of a backward: the last layer has been sent by then."""

    fails = True

    def loss(self, x: Tensor, step: int) -> Tensor:
        if step == 4 and self.fails:
            self.c.weight.register_hook(self._fail)
        return super().loss(x, step)

    def _fail(self, _: Tensor) -> None:
        if self.fails:
            self.fails = False
            raise ArithmeticError("in the middle of backward")


def _fail_and_fit_again(rank: int, strategy: str) -> dict[str, Tensor]:
    pl.seed_everything(7, verbose=False)
    module = Failing()
    with pytest.raises(ArithmeticError):
        quiet_trainer(strategy=strategy_of(strategy), max_steps=6).fit(module, loader())
    for p in module.parameters():
        assert not p._post_accumulate_grad_hooks
        p.grad = None
    quiet_trainer(strategy=strategy_of(strategy), max_steps=6).fit(module, loader())
    return weights(module)


@pytest.mark.parametrize("strategy", ALL)
def test_an_exception_in_backward(strategy: str) -> None:
    """What was on its way when a fit ended meets the next one."""
    ours = train_ranks(_fail_and_fit_again, strategy)
    for rank, other in zip(ours, train_ranks(_fail_and_fit_again, DDP), strict=True):
        assert_same(rank, other)


class Copying(pl.Callback):
    """Copies, pickles and saves the model in the middle of training, and trains the copy."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._copy(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._copy(trainer, pl_module)
        if trainer.global_step % 2:
            path = f"{self.folder}/{type(trainer.strategy).__name__}.ckpt"
            trainer.save_checkpoint(path)
            saved = torch.load(path, weights_only=True)["state_dict"]
            pl_module.seen += [saved["a.weight"], saved["d.bias"]]

    def _copy(self, trainer: Any, pl_module: Any) -> None:
        for another in (copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))):
            another.zero_grad()
            another.a(torch.ones(8)).sum().backward()  # and nobody exchanges it
            pl_module.seen += [another.a.weight.detach(), another.a.weight.grad]
            assert not another.a.weight._post_accumulate_grad_hooks


def test_copies_of_a_model_that_is_trained(tmp_path: Path) -> None:
    """A copy that shares hooks, exchanges gradients, or holds weights of another time."""
    kind = Kind(Layers, callbacks=(partial(Copying, str(tmp_path)),), strategies=AVERAGING)
    assert_equal_to_oracle(kind)


class Tuned(Layers):
    """A learning rate for a Tuner to find."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return loader()


def _tune_and_fit(rank: int, strategy: str, folder: str) -> tuple[Any, ...]:
    pl.seed_everything(7, verbose=False)
    module = Tuned()
    trainer = quiet_trainer(strategy=strategy_of(strategy), max_steps=6, default_root_dir=folder)
    found = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None)
    assert found is not None
    trainer.fit(module)
    return found.suggestion(), found.results["loss"], trainer.global_step, weights(module)


@pytest.mark.parametrize("strategy", ALL)
def test_a_tuner_before_fit(strategy: str, tmp_path: Path) -> None:
    """Trainings that are broken off, and whose weights are put back."""
    ours = train_ranks(_tune_and_fit, strategy, str(tmp_path))
    theirs = train_ranks(_tune_and_fit, DDP, str(tmp_path))
    for rank, other in zip(ours, theirs, strict=True):
        assert rank[:3] == other[:3]
        assert_same(rank[3], other[3])
