"""What the tests of schedule="cross_iteration" train: many small models by two strategies."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from ranks import train_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same, make_strategy, quiet_trainer

from lightning_mgwfbp import AlphaBeta

# one group for each tensor: as many moments as there can be at which an update is late
CROSS: dict[str, Any] = {"planner": "wfbp", "warmup_steps": 1, "link": AlphaBeta(1e-4, 1e-7)}
OURS = "mgwfbp_cross_iteration"
DDP = "ddp_find_unused_parameters_true"
STEPS = 7


class Trap(pl.LightningModule):
    """A loss of any kind; counts the steps that it began before the last update was complete."""

    def __init__(self) -> None:
        super().__init__()
        self.deferred = 0
        self.seen: list[Any] = []  # whatever else must be the same under both strategies

    def loss(self, x: Tensor, step: int) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        session = getattr(self.trainer.strategy, "session", None)
        self.deferred += session is not None and session.pending
        return self.loss(batch[0].to(self.dtype), self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Layers(Trap):
    """Four linear layers in a row, to be used otherwise by subclasses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def loss(self, x: Tensor, step: int) -> Tensor:
        for layer in (self.a, self.b, self.c, self.d):
            x = layer(x).tanh()
        return x.square().mean()


@dataclass(frozen=True)
class Run:
    """One training; the same by every strategy.

    Attributes:
        module: makes the model.
        trainer: arguments of the Trainer.
        callbacks: each makes one.
        strategy: arguments of our strategy.
        oracle: the strategy whose bits count.
        defers: whether updates must have been late: there is no test else.
    """

    module: Callable[[], Trap] = Layers
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    strategy: Mapping[str, Any] = field(default_factory=dict)
    oracle: str = DDP
    defers: bool = True


def loader(seed: int = 3, count: int = 512) -> DataLoader[Any]:
    data = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(data), batch_size=4)


def strategy_of(name: str, **options: Any) -> Any:
    """A strategy; options are for ours."""
    return make_strategy(name, **({**CROSS, **options} if name.startswith("mgwfbp") else {}))


def fit(
    run: Run, strategy: str, ckpt_path: str | None = None, **trainer_kwargs: Any
) -> dict[str, Any]:
    """What is left after training by `strategy`: weights, optimizer state, and what was seen."""
    pl.seed_everything(7, verbose=False)
    module = run.module()
    chosen = strategy_of(strategy, **run.strategy)
    trainer = quiet_trainer(
        strategy=chosen,
        callbacks=[make() for make in run.callbacks],
        **{"max_steps": STEPS, **run.trainer, **trainer_kwargs},
    )
    validation = loader(4, 16) if is_overridden("validation_step", module) else None
    trainer.fit(module, loader(), validation, ckpt_path=ckpt_path)
    assert not any("all-gathers" in thread.name for thread in threading.enumerate())
    state = trainer.optimizers[0].state_dict()["state"]
    moments = {f"{i}.{k}": v for i, kept in state.items() for k, v in kept.items()}
    return {
        "weights": {k: v.clone() for k, v in module.state_dict().items()},
        "moments": {k: v.clone() for k, v in moments.items() if isinstance(v, Tensor)},
        "seen": module.seen,
        "deferred": module.deferred,
        "steps": trainer.global_step,
    }


def _fit_by_both(rank: int, runs: dict[str, Run]) -> dict[str, Any]:
    return {name: _by_both(run) for name, run in runs.items()}


def _by_both(run: Run) -> Any:
    try:
        return fit(run, OURS), fit(run, run.oracle)
    except Exception:
        return traceback.format_exc()[-1500:]  # on the other rank, too, or it waits


def assert_equal_to_oracle(runs: dict[str, Run]) -> None:
    """All ranks end with the oracle's bits, and updates were late where they should be."""
    ranks = train_ranks(_fit_by_both, runs)
    results = [(name, result) for rank in ranks for name, result in rank.items()]
    wrong = [f"{name}: {why}" for name, r in results if (why := _difference(r, runs[name].defers))]
    assert not wrong, "\n".join(wrong)


def _difference(result: Any, defers: bool) -> str:
    try:
        assert not isinstance(result, str), result
        ours, theirs = result
        assert ours["steps"] == theirs["steps"]
        assert_same(ours["weights"], theirs["weights"])
        assert_same(ours["moments"], theirs["moments"])
        assert len(ours["seen"]) == len(theirs["seen"])
        for i, (a, b) in enumerate(zip(ours["seen"], theirs["seen"], strict=True)):
            is_same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
            assert is_same, f"seen[{i}]: {a}, not {b}"
        assert bool(ours["deferred"]) == defers, f"{ours['deferred']} updates were late"
    except AssertionError as error:
        return str(error)
    return ""
