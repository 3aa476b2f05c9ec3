"""A failure here means: numbers of a plan go under a step that Lightning does not log under."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from ranks import train_ranks
from torch import Tensor, nn
from torch.optim import SGD
from training import Toy, ToyData, make_strategy, quiet_trainer

from lightning_mgwfbp import WarmupCallback

Row = tuple[int, bool]  # its step, and whether it has a plan's numbers


class Strict(Logger):
    """Refuses a step lower than the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Row] = []

    name = "strict"
    version = 0

    def log_hyperparams(self, *_: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        assert not self.rows or step >= self.rows[-1][0], (
            f"{self.rows[-1]}, then {step}: {sorted(metrics)}"
        )
        self.rows.append((step, "mgwfbp/merge_groups" in metrics))


class Logging(Toy):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch, batch_idx)
        self.log("loss", loss)
        self.log("mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class ByHand(Logging):
    """Steps twice in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        parts: list[nn.Module] = [self.stem, self.head]
        return [SGD(part.parameters(), lr=0.1) for part in parts]


def fit(rank: int, logger: Strict, module: Toy, ckpt_path: Any = None, **options: Any) -> Any:
    """The trainer, after a fit that plans at its second step."""
    given = options.pop("strategy", {})
    trainer = quiet_trainer(
        strategy=make_strategy("mgwfbp", **{"warmup_steps": 2, **given}),
        logger=logger,
        **{"log_every_n_steps": 1, "max_steps": 6, **options},
    )
    trainer.fit(module, ToyData(), ckpt_path=ckpt_path)
    return trainer


def alone(rank: int, by_hand: bool, options: dict[str, Any]) -> list[Row]:
    logger = Strict()
    fit(rank, logger, ByHand() if by_hand else Logging(), **options)
    return logger.rows


# the steps at which a plan is made, and those of Lightning's own rows
ALONE = {
    "one optimizer": (False, {}, [1], range(6)),
    "two optimizers by hand": (True, {"max_steps": 12}, [1], range(6)),
    "accumulation": (False, {"accumulate_grad_batches": 3}, [1], range(6)),
    "replanning": (False, {"strategy": {"replan_every_n_steps": 2}}, [1, 5], range(6)),
    "seldom": (False, {"log_every_n_steps": 4}, [1], [3]),
    "epochs": (False, {"limit_train_batches": 3}, [1], [0, 1, 2, 2, 3, 4, 5, 5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ALONE)
def test_a_plan_is_logged_beside_its_batch(case: str) -> None:
    """A logger of the user's refuses rows, its own or a plan's."""
    by_hand, options, planned, others = ALONE[case]
    for rows in train_ranks(alone, by_hand, options):
        assert [step for step, is_plan in rows if is_plan] == planned
        own = [step for step, is_plan in rows if not is_plan]
        # where max_steps ends an epoch, Lightning logs its means once more
        assert own[: len(list(others))] == list(others)


def with_profile(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a fit that saves what it measures."""
    return {**options, "callbacks": [WarmupCallback(folder), *options.get("callbacks", [])]}


def resumed(rank: int, folder: str, saved_in: str) -> list[Row]:
    """Goes on with the same logger, planning by what the first fit measured."""
    logger = Strict()
    saving: dict[str, Any] = {"limit_train_batches": 5}
    path = f"{folder}/saved/kept.ckpt"
    if saved_in == "fit":
        saver = ModelCheckpoint(f"{folder}/saved", "kept", every_n_train_steps=5)
        saving |= {"enable_checkpointing": True, "callbacks": [saver]}
    trainer = fit(rank, logger, Logging(), max_steps=5, **with_profile(folder, saving))
    if saved_in == "the end":
        trainer.save_checkpoint(path)
    planned = {"profile": f"{folder}/profile.json", "link": f"{folder}/link.json"}
    fit(rank, logger, Logging(), path, max_steps=8, strategy=planned, **saving)
    return logger.rows


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty")
@pytest.mark.parametrize("saved_in", ["fit", "the end"])
def test_a_plan_made_before_a_checkpoint_is_resumed(tmp_path: Path, saved_in: str) -> None:
    """The plan is logged under step 0, which the run has left behind."""
    for rows in train_ranks(resumed, str(tmp_path), saved_in):
        first, second = (step for step, is_plan in rows if is_plan)
        assert first == 1
        assert second == min(step for step, _ in rows if step > 4)


def again(rank: int) -> list[Row]:
    """Fits three times with one Trainer."""
    logger, module = Strict(), Logging()
    trainer = fit(rank, logger, module, max_steps=4)
    for steps in (8, 12):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(module, ToyData())
    return logger.rows


@pytest.mark.slow
def test_fits_one_after_another() -> None:
    """A second fit begins to count anew."""
    for rows in train_ranks(again):
        assert [step for step, is_plan in rows if is_plan] == [1, 5, 9]
