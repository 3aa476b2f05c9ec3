"""A failure here means: a stage of a Trainer's life does not work as under strategy="ddp"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from ranks import train_ranks
from torch import Tensor, nn
from training import (
    Toy,
    ToyData,
    assert_same,
    make_strategy,
    quiet_trainer,
    residual_of,
    sparse,
    toy,
    train,
)

from lightning_mgwfbp import AlphaBeta, MergePlan, ModelProfile, TopK, WarmupCallback


def _resume(rank: int, first: str, second: str, folder: str) -> dict[str, Tensor]:
    path = str(Path(folder) / f"{first}-{second}.ckpt")
    for strategy, epochs, ckpt_path in ((first, 1, None), (second, 2, path)):
        pl.seed_everything(7, verbose=False)
        module, data = toy(optimizer="adam")
        trainer = quiet_trainer(strategy=strategy, max_epochs=epochs, limit_train_batches=8)
        trainer.fit(module, data, ckpt_path=ckpt_path)
        if ckpt_path is None:
            trainer.save_checkpoint(path)
    return module.state_dict()


@pytest.mark.parametrize(("first", "second"), [("mgwfbp", "ddp"), ("ddp", "mgwfbp")])
def test_a_checkpoint_resumes_under_the_other_strategy(
    first: str, second: str, tmp_path: Path
) -> None:
    """Checkpoint format."""
    crossed = train_ranks(_resume, first, second, str(tmp_path))
    stayed = train_ranks(_resume, "ddp", "ddp", str(tmp_path))
    assert_same(crossed[0], stayed[0])
    saved = torch.load(tmp_path / f"{first}-{second}.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == crossed[0].keys()


class _Inspector(pl.Callback):
    """Counts hooks on parameters, and looks at where gradients lie."""

    def __init__(self) -> None:
        self.hooks: list[int] = []
        self.extents: list[int] = []
        self.held: list[tuple[Tensor, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        parameters = list(pl_module.parameters())
        self.hooks.append(sum(len(p._post_accumulate_grad_hooks or ()) for p in parameters))
        ends = [p.grad.data_ptr() + p.grad.nbytes for p in parameters]
        self.extents.append(max(ends) - min(p.grad.data_ptr() for p in parameters))
        self.held.append((parameters[0].grad, parameters[0].grad.clone()))


def _inspect(rank: int) -> tuple[list[int], list[int], int, bool]:
    module, data = toy()
    inspector = _Inspector()
    strategy = make_strategy("mgwfbp", planner="single", warmup_steps=3)
    quiet_trainer(strategy=strategy, max_steps=8, callbacks=[inspector]).fit(module, data)
    left = sum(len(p._post_accumulate_grad_hooks or ()) for p in module.parameters())
    intact = all(torch.equal(now, then) for now, then in inspector.held)
    return inspector.hooks, inspector.extents, left, intact


def test_hooks_and_gradients_in_the_steady_state() -> None:
    """Each parameter has one hook, until the end of the fit; gradients lie side by side."""
    nbytes = sum(p.nbytes for p in Toy().parameters())
    for hooks, extents, left, intact in train_ranks(_inspect):
        assert hooks == [6] * 8
        assert left == 0
        assert extents == [nbytes] * 8  # all six gradients lie in one bucket
        assert intact


class _Everything(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append("predict")
        return self.stem(batch[0]).sum()


def _whole_life(rank: int) -> tuple[dict[str, int], dict[str, Tensor], int]:
    module, loader = _Everything(), ToyData().train_dataloader()
    limits = {f"limit_{stage}_batches": 2 for stage in ("val", "test", "predict")}
    limits["use_distributed_sampler"] = False  # which Lightning warns of in validate and test
    trainer = quiet_trainer(strategy="mgwfbp", max_epochs=1, limit_train_batches=8, **limits)
    trainer.fit(module, loader, loader)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    predictions = trainer.predict(module, loader)
    assert predictions is not None
    quiet_trainer(strategy="mgwfbp", fast_dev_run=True).fit(module, loader, loader)
    counts = {stage: module.seen.count(stage) for stage in ("validate", "test", "predict")}
    return counts, module.state_dict(), trainer.global_step


def test_fit_twice_validate_test_predict_and_fast_dev_run() -> None:
    """Setup and teardown undo each other."""
    (counts, state, steps), (_, other, _) = train_ranks(_whole_life)
    assert counts == {"validate": 7, "test": 2, "predict": 2}
    assert steps == 16
    assert_same(state, other)


def _fit_twice(rank: int, folder: str) -> list[int]:
    left = []

    class Spy(pl.Callback):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            left.append(len(residual_of(trainer)))

    module, loader = _Everything(), ToyData().train_dataloader()
    strategy = make_strategy("mgwfbp_topk", **sparse(TopK(0.1, dense_below_numel=0)))
    limits = {"limit_train_batches": 8, "limit_val_batches": 2, "use_distributed_sampler": False}
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, callbacks=[Spy()], **limits)
    trainer.fit(module, loader, loader)
    trainer.validate(module, loader, verbose=False)
    trainer.save_checkpoint(f"{folder}/first.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(f"{folder}/second.ckpt")
    return left


def test_rests_are_those_of_one_fit(tmp_path: Path) -> None:
    """As optimizers' state: none when fit begins, and still there when others have run since."""
    assert train_ranks(_fit_twice, str(tmp_path)) == [[0, 0]] * 2
    for name in ("first", "second"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["mgwfbp"]
        assert [rank["step"] for rank in saved["exchanger"]] == [8, 8]


class _Gan(pl.LightningModule):
    """Two optimizers by hand, toggled; the first also accumulates over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(8, 8)
        self.critic = nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for network, optimizer in zip(
            (self.generator, self.critic), self.optimizers(), strict=True
        ):
            self.toggle_optimizer(optimizer)
            sign = 1.0 if network is self.critic else -1.0
            self.manual_backward(sign * self.critic(self.generator(batch[0])).tanh().mean())
            if network is self.critic or batch_idx % 2:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        adam = torch.optim.Adam(self.generator.parameters(), lr=1e-3)
        return [adam, torch.optim.SGD(self.critic.parameters(), lr=1e-2)]


def _train_gan(rank: int, strategy: str) -> tuple[dict[str, Tensor], int]:
    pl.seed_everything(7, verbose=False)
    module = _Gan()
    trainer = quiet_trainer(strategy=strategy, max_epochs=1, limit_train_batches=12)
    trainer.fit(module, ToyData().train_dataloader())
    return module.state_dict(), trainer.global_step


def test_manual_optimization_with_two_optimizers() -> None:
    """Several backwards per step; parameters frozen and unfrozen within it."""
    ours = train_ranks(_train_gan, "mgwfbp")
    theirs = train_ranks(_train_gan, "ddp_find_unused_parameters_true")
    assert ours[0][1] == theirs[0][1] == 18
    assert_same(ours[0][0], ours[1][0])
    for name, value in ours[0][0].items():
        torch.testing.assert_close(value, theirs[0][0][name], rtol=1e-6, atol=1e-7)


def _train_and_save(rank: int, folder: str, strategy_kwargs: dict[str, Any]) -> Any:
    callback = WarmupCallback(save_dir=folder)
    module, data = toy()
    strategy = make_strategy("mgwfbp", **{"warmup_steps": 2, **strategy_kwargs})
    quiet_trainer(strategy=strategy, max_steps=3, callbacks=[callback]).fit(module, data)
    return strategy.tuned


def _train_from(rank: int, strategy_kwargs: dict[str, str]) -> Any:
    """The plan in force in the very first step."""
    plans = []

    class Spy(pl.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            assert not trainer.strategy.session.warmup.running
            plans.append(trainer.strategy.session.reducer.plan)

    module, data = toy()
    strategy = make_strategy("mgwfbp", **strategy_kwargs)
    quiet_trainer(strategy=strategy, max_steps=2, callbacks=[Spy()]).fit(module, data)
    return plans[0]


def test_what_was_measured_can_be_saved_and_given_back(tmp_path: Path) -> None:
    """profile=, link= and a saved plan spare the warm-up."""
    tuned, _ = train_ranks(_train_and_save, str(tmp_path), {})
    assert ModelProfile.load(tmp_path / "profile.json") == tuned.profile
    assert AlphaBeta.load(tmp_path / "link.json") == tuned.link
    assert MergePlan.load(tmp_path / "plan.json") == tuned.plan
    profile, link = str(tmp_path / "profile.json"), str(tmp_path / "link.json")
    assert train_ranks(_train_from, {"profile": profile, "link": link}) == [tuned.plan] * 2
    assert train_ranks(_train_from, {"planner": str(tmp_path / "plan.json")}) == [tuned.plan] * 2


def test_a_saved_plan_says_what_travels_compressed(tmp_path: Path) -> None:
    """plan.json with densities."""
    compressor = TopK("auto", density_floor=0.1, dense_below_numel=0)
    tuned, _ = train_ranks(_train_and_save, str(tmp_path), sparse(compressor))
    assert len(tuned.plan.densities) == len(tuned.plan.groups) == 6
    assert min(tuned.plan.densities) == 0.1  # the last group hides behind nothing
    assert MergePlan.load(tmp_path / "plan.json") == tuned.plan
    given = {"planner": str(tmp_path / "plan.json"), "compressor": compressor}
    assert train_ranks(_train_from, given) == [tuned.plan] * 2


def _replan(rank: int) -> list[bool]:
    running = []

    class Spy(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            running.append(trainer.strategy.session.warmup.running)

    module, data = toy()
    strategy = make_strategy("mgwfbp", warmup_steps=2, replan_every_n_steps=3)
    quiet_trainer(strategy=strategy, max_steps=9, callbacks=[Spy()]).fit(module, data)
    return running


def test_replanning_measures_anew() -> None:
    """replan_every_n_steps: two steps of warm-up, three by the plan, and again."""
    on, off = True, False
    assert train_ranks(_replan) == [[on, off, off, off, on, on, off, off, off]] * 2


def _log(rank: int, folder: str) -> None:
    module, data = toy()
    logger = CSVLogger(folder, name="", version="run")
    strategy = make_strategy("mgwfbp", warmup_steps=2)
    trainer = quiet_trainer(strategy=strategy, max_steps=3, logger=logger)
    trainer.fit(module, data)


def test_the_plan_is_logged_by_the_trainers_logger(tmp_path: Path) -> None:
    """Tuned.metrics through Lightning's logger."""
    train_ranks(_log, str(tmp_path))
    header, *rows = (tmp_path / "run" / "metrics.csv").read_text().splitlines()
    assert "mgwfbp/predicted_exposed_seconds" in header.split(",")
    assert len(rows) == 1


def _different_clocks(rank: int) -> Any:
    """As if this rank's backward ran in another order and ten times slower."""

    class Skewed(WarmupCallback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            warmup = trainer.strategy.session.warmup
            if warmup.running and rank == 1:
                for backward in warmup._profiler._backwards:
                    marks = backward.marks
                    backward.marks = {
                        name: backward.start + 10.0 * (i + 1)
                        for i, name in enumerate(reversed(list(marks)))
                    }
            super().on_train_batch_end(trainer, *args)

    module, data = toy()
    strategy = make_strategy("mgwfbp", planner="wfbp", warmup_steps=3)
    quiet_trainer(strategy=strategy, max_steps=6, callbacks=[Skewed()]).fit(module, data)
    return strategy.tuned.plan, strategy.tuned.profile.backward_seconds


def test_ranks_that_measured_different_times_share_one_plan() -> None:
    """The plan is broadcast; the slowest rank counts."""
    (plan, seconds), (other, _) = train_ranks(_different_clocks)
    assert plan == other
    assert seconds > 10.0


def test_shorter_than_the_warm_up_equals_ddp() -> None:
    """Gradients are averaged from the first step."""
    ours = train_ranks(_two_steps, "mgwfbp")
    theirs = train_ranks(_two_steps, "ddp")
    assert ours[0]["plan"] is None
    assert_same(ours[0]["state"], theirs[0]["state"])


def _two_steps(rank: int, strategy: str) -> dict[str, Any]:
    return train(rank, strategy, steps=2)
