"""A failure here means: a MergedOptimizer outlives its end, or shares what it must not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cross_traps import Layers, loader
from kinds import BACKWARD, strategy_of
from ranks import run_ranks, train_ranks
from torch import nn
from training import quiet_trainer

from lightning_mgwfbp import MergedOptimizer, MergePlan

pytestmark = pytest.mark.slow


def merged_of(model: nn.Module, **options: Any) -> MergedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return MergedOptimizer(optimizer, model.named_parameters(), **options)


def hooks_of(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def _end_twice(rank: int, options: dict[str, Any]) -> None:
    model = nn.Linear(2, 2)
    module = {"module": model} if "schedule" in options else {}
    merged = merged_of(model, **options, **module)
    for _ in range(2):
        merged.close()
        assert not hooks_of(model)
    model(torch.ones(2)).sum().backward()
    merged.optimizer.step()


@pytest.mark.parametrize("options", [{}, {"schedule": "cross_iteration"}], ids=str)
def test_a_second_close_does_nothing(options: dict[str, Any]) -> None:
    """close() in an `except` and in a `finally`."""
    run_ranks(_end_twice, options)


def _exchange_twice(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = merged_of(model[1])
    with pytest.raises(ValueError, match=r"Parameter '1\.weight' is exchanged already"):
        merged_of(model)
    second = merged_of(model[0])
    first.close()
    second.close()
    merged_of(model).close()


def test_two_over_the_same_parameters() -> None:
    """A gradient that is averaged twice; an error that leaves hooks or a process group behind."""
    run_ranks(_exchange_twice)


def _fail_and_try_again(rank: int) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="planner"):
        merged_of(model, planner=MergePlan(("other",), ((0, 1),)))
    assert not hooks_of(model)
    merged_of(model).close()


def test_an_error_leaves_nothing_behind() -> None:
    """Half a MergedOptimizer, because of which there cannot be a whole one."""
    run_ranks(_fail_and_try_again)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Callable[[Any], Any]) -> None:
    """An AttributeError from within, or a second exchange of the same gradients."""
    run_ranks(_copy, copied)


def _copy(rank: int, copied: Callable[[Any], Any]) -> None:
    merged = merged_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copied(merged)
    copy.deepcopy(merged.optimizer).step()
    merged.close()


class Wraps(Layers):
    """Exchanges by itself what the strategy exchanges."""

    def on_fit_start(self) -> None:
        merged_of(self)


def _fit_wrapped(rank: int) -> str:
    trainer = quiet_trainer(strategy=strategy_of(BACKWARD), max_steps=3)
    with pytest.raises(ValueError, match="is exchanged already") as error:
        trainer.fit(Wraps(), loader())
    module = Layers()
    quiet_trainer(strategy=strategy_of(BACKWARD), max_steps=3).fit(module, loader())
    assert not hooks_of(module)
    return str(error.value)


def test_one_beside_the_strategy_is_refused() -> None:
    """A MergedOptimizer in a LightningModule under our strategy."""
    assert "by a Trainer's strategy" in train_ranks(_fit_wrapped)[0]
