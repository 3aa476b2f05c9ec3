"""A failure here is a rank whose weights differ unnoticed in a Trainer's fit, or a false alarm."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import train_ranks
from torch import Tensor
from training import Toy, ToyData, make_strategy, quiet_trainer, sparse

from lightning_mgwfbp import TopK
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Pending

pytestmark = pytest.mark.slow


class Spoil(pl.Callback):
    """Changes one weight of rank 1 by one ulp, once."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            bias = pl_module.head.bias.data
            bias[0] = torch.nextafter(bias[0], torch.tensor(9.0))


class Drift(pl.Callback):
    """Changes all weights of rank 0 by a little, once."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_rank == 0 and trainer.global_step == 60:
            for p in pl_module.parameters():
                p.data += 0.01


class LeaveOut(pl.Callback):
    """Has rank 1's third step change nothing."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        is_idle = trainer.global_rank == 1 and trainer.global_step == 2
        optimizer.param_groups[0]["lr"] = 0.0 if is_idle else 0.1


class StepLeftOut(Toy):
    """Does not take the second step on rank 1."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch, batch_idx))
        if self.global_rank == 0 or batch_idx != 1:
            optimizer.step()
        optimizer.zero_grad()


class FrozenInPart(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.stem.requires_grad_(False)


DEFAULT = {"detect_divergence_every_n_steps": None}
RUNS: dict[str, dict[str, Any]] = {
    "default": {"callbacks": [Drift()], "strategy": DEFAULT, "max_steps": 120},
    "default alone": {"strategy": DEFAULT, "max_steps": 60},
    "spoiled": {"callbacks": [Spoil()]},
    "deferred": {"callbacks": [Spoil()], "strategy": {"schedule": "cross_iteration"}},
    "skipped": {"callbacks": [LeaveOut()]},
    "left out": {"module": StepLeftOut, "strategy": {"warmup_steps": 1}},
    "frozen": {"module": FrozenInPart},
    "accumulated": {"accumulate_grad_batches": 2},
    "topk": {"strategy": sparse(TopK(0.1, dense_below_numel=0))},
    "deferred alone": {"strategy": {"schedule": "cross_iteration", "planner": "wfbp"}},
}


def _fit(rank: int, names: list[str]) -> list[tuple[str, int]]:
    """What is said, and how often weights were compared."""
    return [_fit_one(RUNS[name]) for name in names]


def _fit_one(run: dict[str, Any]) -> tuple[str, int]:
    pl.seed_everything(7, verbose=False)
    options = dict(run)
    given = {"warmup_steps": 2, "detect_divergence_every_n_steps": 2, **options.pop("strategy", {})}
    strategy = make_strategy("mgwfbp", **given)
    module = options.pop("module", Toy)()
    compared = 0
    start = TorchTransport.all_reduce

    def counting(transport: TorchTransport, buffer: Tensor, *, key: str) -> Pending:
        nonlocal compared
        compared += key == "weights"
        return start(transport, buffer, key=key)

    TorchTransport.all_reduce = counting  # type: ignore[method-assign]
    try:
        quiet_trainer(**{"strategy": strategy, "max_steps": 6, **options}).fit(module, ToyData())
    except RuntimeError as error:
        return str(error), compared
    finally:
        TorchTransport.all_reduce = start  # type: ignore[method-assign]
    return "", compared


@pytest.mark.filterwarnings("ignore:.*schedule.*has no effect.*:UserWarning")
def test_a_difference_ends_every_rank() -> None:
    """A rank's own ulp, or a step that it leaves out, goes unseen or hangs."""
    first, second = train_ranks(_fit, ["spoiled", "deferred", "skipped"])
    assert first == second
    for (said, compared), weight in zip(
        first, ["head.bias'[0]", "head.bias'[0]", "stem.weight'[0, 0]"], strict=True
    ):
        assert said.startswith(f"The ranks' weights differ after 4 steps: '{weight} is ")
        assert " on rank 0 and " in said
        assert " on rank 1; " in said
        assert compared == 3  # before the first step, too


def test_a_step_left_out() -> None:
    """Ranks compare weights of different steps, or wait for one that is elsewhere."""
    for ((said, compared),) in train_ranks(_fit, ["left out"]):
        assert said.startswith("The ranks are out of step")
        assert compared == 2


def test_no_false_alarm() -> None:
    """Frozen parameters, windows, compressors or deferred steps count as differences."""
    runs = ["frozen", "accumulated", "topk", "deferred alone"]
    assert train_ranks(_fit, runs) == [[("", 3)] * 4] * 2


def test_drift_is_seen_by_default() -> None:
    """Weights that a callback has changed on rank 0 are trained on with, or hang one of the ranks;
    or they are compared more often than they need be."""
    first, second = train_ranks(_fit, ["default", "default alone"])
    assert first == second
    (said, compared), alone = first
    assert said.startswith("The ranks' weights differ after 100 steps: 'stem.weight'[")
    assert "; 6 of 6 parameters differ" in said
    assert compared == 3
    assert alone == ("", 2)
