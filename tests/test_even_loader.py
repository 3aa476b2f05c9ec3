"""A failure here means: a training loader is not what users or Lightning take it for."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import lightning.pytorch as pl
import pytest
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.combined_loader import _shutdown_workers_and_reset_iterator
from lightning.pytorch.utilities.data import _update_dataloader
from ranks import train_ranks
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from training import assert_same, make_strategy, quiet_trainer
from uneven import SIZE, Batches, Model, make_model, numbers

from lightning_mgwfbp.batch_counts import BatchCounts
from lightning_mgwfbp.even_loader import EvenLoader
from lightning_mgwfbp.exchange.transport import LoopbackTransport


class OwnSampler(BatchSampler):
    """Whose length Lightning cannot know."""


class OwnLoader(DataLoader[Any]):
    pass


def own_loader(*, workers: int = 0) -> OwnLoader:
    data = TensorDataset(numbers(0, 8))
    sampler = OwnSampler(SequentialSampler(data), SIZE, drop_last=False)
    return OwnLoader(
        data, batch_sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )


def evened(loader: Any) -> EvenLoader:
    counts = SimpleNamespace(transport=LoopbackTransport.solo(), is_open=False)
    return EvenLoader(loader, cast(BatchCounts, counts), quiet_trainer(devices=1), True)


def test_it_is_what_it_wraps() -> None:
    """Users' `isinstance(trainer.train_dataloader, DataLoader)` is False, or ours fails."""
    loader = own_loader()
    even = evened(loader)
    assert isinstance(even, DataLoader)
    assert isinstance(even, OwnLoader)
    assert isinstance(even, EvenLoader)
    assert even.dataset is loader.dataset
    assert even.batch_sampler is loader.batch_sampler
    assert len(list(even)) == len(list(copy.copy(even))) == len(list(loader))
    batches = evened(Batches([1, 2]))
    assert isinstance(batches, EvenLoader)
    assert not isinstance(batches, DataLoader | list)


def test_lightning_does_not_make_it_anew() -> None:
    """A user's CombinedLoader cannot be set up twice."""
    loader = own_loader()
    sampler = SequentialSampler(range(3))
    even = cast(DataLoader[Any], evened(loader))
    assert _update_dataloader(even, sampler, mode=RunningStage.TRAINING) is loader


@pytest.mark.slow
def test_persistent_workers_are_those_of_the_loader() -> None:
    """Lightning does not end them, or they are started anew for each epoch."""
    loader = own_loader(workers=1)
    even = evened(loader)
    first = [int(batch[0].numel()) for batch in even]
    workers = even._iterator
    assert workers is loader._iterator is not None
    assert [int(batch[0].numel()) for batch in even] == first
    assert loader._iterator is workers
    _shutdown_workers_and_reset_iterator(even)
    assert loader._iterator is None


class Asks(pl.Callback):
    """Notes of each epoch what the training loader says that it is."""

    def __init__(self) -> None:
        self.said: list[bool] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        loader = trainer.train_dataloader
        assert isinstance(loader, DataLoader | EvenLoader)
        self.said.append(isinstance(loader, DataLoader) and len(loader.dataset) == 32)


class Reloaded(Model):
    """Gives the same CombinedLoader each time."""

    def __init__(self) -> None:
        super().__init__()
        self.loaders = CombinedLoader(own_loader(), "max_size")

    def train_dataloader(self) -> CombinedLoader:
        return self.loaders


def fit_twice(rank: int, strategy: str, reload: int) -> dict[str, Any]:
    module, asks = make_model(Reloaded), Asks()
    for _ in range(2):
        trainer = quiet_trainer(
            strategy=make_strategy(strategy),
            max_epochs=2,
            callbacks=[asks],
            reload_dataloaders_every_n_epochs=reload,
        )
        trainer.fit(module)
    return {"state": module.state_dict(), "taken": module.taken, "said": asks.said}


@pytest.mark.slow
@pytest.mark.parametrize("reload", [0, 1])
def test_a_combined_loader_is_used_again(reload: int) -> None:
    """Batches are lost, or Lightning's set-up fails at a wrapped loader."""
    ddp = train_ranks(fit_twice, "ddp", reload)
    for ours, theirs in zip(train_ranks(fit_twice, "mgwfbp", reload), ddp, strict=True):
        assert_same(ours["state"], theirs["state"])
        assert ours["taken"] == theirs["taken"]
        assert ours["said"] == [True] * 4
