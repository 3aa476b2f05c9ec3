"""A failure here means: under schedule="cross_iteration" weights are not DDP's where one looks."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import train_ranks
from torch import Tensor
from training import MODELS, assert_same, make_strategy, quiet_trainer

from lightning_mgwfbp import AlphaBeta

pytestmark = pytest.mark.slow

STEPS = 50
# by a link so slow that most all-gathers are left for the next forward
CROSS = {"planner": "wfbp", "warmup_steps": 3, "link": AlphaBeta(1e-4, 1e-7)}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5),
}


def train(
    rank: int, strategy: str, model: str, optimizer: str, options: dict[str, Any]
) -> dict[str, Tensor]:
    """Weights after `STEPS` steps between which nobody looks; a schedule changes the rate."""
    pl.seed_everything(7, verbose=False)
    module, data = MODELS[model]()
    module.configure_optimizers = lambda: with_schedule(OPTIMIZERS[optimizer](module.parameters()))
    kwargs = CROSS if strategy == "mgwfbp_cross_iteration" else {}
    chosen = make_strategy(strategy, **kwargs)
    trainer = quiet_trainer(strategy=chosen, max_steps=STEPS, **options)
    trainer.fit(module, data)
    assert trainer.global_step == STEPS
    return {name: value.clone() for name, value in module.state_dict().items()}


def with_schedule(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", ["digits", "gpt"])
def test_nobody_looks(model: str, optimizer: str) -> None:
    """An update is lost, doubled, late, or made with another step's rate."""
    ours = train_ranks(train, "mgwfbp_cross_iteration", model, optimizer, {})
    theirs = train_ranks(train, "ddp", model, optimizer, {})
    assert_same(ours[0], theirs[0])
    assert_same(ours[1], theirs[1])
