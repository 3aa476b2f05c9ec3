"""What the tests of kinds of training run: one training by every strategy, and by DDP."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from cross_traps import DDP, loader
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from ranks import train_ranks
from torch import Tensor
from training import assert_same, make_strategy, quiet_trainer

from lightning_mgwfbp import AlphaBeta, TopK

# one group for each tensor, so that order, overlap and the last bucket all matter
_OPTIONS: dict[str, Any] = {
    "planner": "wfbp",
    "warmup_steps": 2,
    "link": AlphaBeta(alpha=1e-4, beta=1e-7),
}
BACKWARD, CROSS, HOROVOD, WHOLE = "mgwfbp", "mgwfbp_cross_iteration", "mgwfbp_horovod", "whole"
AVERAGING = (BACKWARD, HOROVOD, WHOLE)  # what has averages in `.grad` when backward has ended
ALL = (*AVERAGING, CROSS)


@dataclass(frozen=True)
class Kind:
    """One training; the same by every strategy.

    Attributes:
        module: makes the model.
        trainer: arguments of the Trainer.
        callbacks: each makes one.
        strategies: those that must end with the oracle's bits.
        oracle: the strategy whose bits count.
        loaders: makes what is trained on.
        defers: whether updates must have been late where steps may be deferred.
        options, oracle_options: arguments of our strategies, and of the oracle.
    """

    module: Callable[[], pl.LightningModule]
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], pl.Callback], ...] = ()
    strategies: tuple[str, ...] = ALL
    oracle: str = DDP
    loaders: Callable[[], Any] = loader
    defers: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    oracle_options: Mapping[str, Any] = field(default_factory=dict)


class ByHand(DDPStrategy):
    """The oracle where DistributedDataParallel has none: before a step, each gradient that some
    rank has is averaged by itself."""

    def configure_ddp(self) -> None:
        pass  # all ranks make the same model

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        def averaging() -> Any:
            loss = closure()
            self._average()
            return loss

        return super().optimizer_step(optimizer, averaging, model, **kwargs)

    def _average(self) -> None:
        assert self.lightning_module is not None
        for p in self.lightning_module.parameters():
            used = torch.tensor(float(p.grad is not None))
            dist.all_reduce(used)
            if used and p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                p.grad /= self.world_size
                dist.all_reduce(p.grad)


BY_HAND = "by hand"


class Witness(pl.Callback):
    """Sees at the end of training whether exchanges began during backward."""

    overlapped: bool | None = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        session = getattr(trainer.strategy, "session", None)
        self.overlapped = None if session is None else session.reducer.overlaps


def strategy_of(name: str, **options: Any) -> Any:
    """A strategy by one of the names above, or by its own."""
    if name == WHOLE:
        # everything travels, through the machinery of what leaves something behind
        name, options = BACKWARD, {**options, "compressor": TopK(1.0, dense_below_numel=0)}
    if name == BY_HAND:
        return ByHand(**options)
    return make_strategy(
        name, **({**_OPTIONS, **options} if name.startswith("mgwfbp") else options)
    )


def fit(kind: Kind, strategy: str) -> dict[str, Any]:
    """What is left after training by `strategy`."""
    pl.seed_everything(7, verbose=False)
    module, witness = kind.module(), Witness()
    plain = getattr(module, "_orig_mod", module)  # where all of it is compiled
    options = kind.options if strategy in ALL else kind.oracle_options
    trainer = quiet_trainer(
        strategy=strategy_of(strategy, **options),
        callbacks=[witness, *(make() for make in kind.callbacks)],
        **{"max_steps": 6, **kind.trainer},
    )
    validation = loader(4, 16) if is_overridden("validation_step", plain) else None
    trainer.fit(module, kind.loaders(), validation)
    return {
        "weights": {k: v.clone() for k, v in plain.state_dict().items()},
        "moments": _tensors([o.state_dict()["state"] for o in trainer.optimizers]),
        "seen": getattr(plain, "seen", []),
        "steps": trainer.global_step,
        "overlapped": witness.overlapped,
        "deferred": bool(getattr(plain, "deferred", 0)),
    }


def _tensors(states: list[Any]) -> dict[str, Tensor]:
    return {
        f"{number} {index} {name}": value.clone()
        for number, state in enumerate(states)
        for index, kept in state.items()
        for name, value in kept.items()
        if isinstance(value, Tensor)
    }


def _numbers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With one NaN as good as another."""
    return {
        k: torch.view_as_real(v) if v.is_complex() else v.nan_to_num() for k, v in tensors.items()
    }


def assert_equal_to_oracle(kind: Kind) -> None:
    """Each rank ends with the oracle's bits, by a plan and overlapped."""
    wrong = [line for rank in train_ranks(_fit_by_all, kind) for line in rank]
    assert not wrong, "\n".join(wrong)


def _fit_by_all(rank: int, kind: Kind) -> list[str]:
    """What differs, and by which strategy. Compared here: thousands of tensors would have to pass
    to the other process as open files."""
    theirs = _attempt(kind, kind.oracle)
    return [
        f"rank {rank}, {name}: {why}"
        for name in kind.strategies
        if (why := _difference(_attempt(kind, name), theirs, kind.defers and name == CROSS))
    ]


def _attempt(kind: Kind, strategy: str) -> Any:
    try:
        return fit(kind, strategy)
    except Exception:
        return traceback.format_exc()[-1500:]  # on the other rank, too, or it waits


def _difference(ours: Any, theirs: Any, defers: bool) -> str:
    try:
        assert not isinstance(theirs, str), theirs
        assert not isinstance(ours, str), ours
        assert ours["steps"] == theirs["steps"] > 2  # of which two are the warm-up
        assert ours["overlapped"], "exchanges never began during backward"
        assert ours["deferred"] == defers, f"updates were{'' if ours['deferred'] else ' not'} late"
        assert_same(_numbers(ours["weights"]), _numbers(theirs["weights"]))
        assert_same(_numbers(ours["moments"]), _numbers(theirs["moments"]))
        assert len(ours["seen"]) == len(theirs["seen"])
        for i, (a, b) in enumerate(zip(ours["seen"], theirs["seen"], strict=True)):
            is_same = torch.equal(a, b) if isinstance(a, Tensor) else a == b
            assert is_same, f"seen[{i}]: {a}, not {b}"
    except AssertionError as error:
        return str(error) or traceback.format_exc()[-500:]
    return ""
