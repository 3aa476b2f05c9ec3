"""A failure here means: what a compressor has left behind does not survive a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from ranks import train_ranks
from torch import Tensor
from training import (
    Drawn,
    ToyData,
    assert_same,
    make_strategy,
    quiet_trainer,
    residual_of,
    sparse,
)

from lightning_mgwfbp import MergePlan, MGWFBPStrategy, PowerSGD, Quantize8, RandomK, TopK

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    # the data are drawn by step
    pytest.mark.filterwarnings("ignore:.*resuming from a checkpoint that ended before"),
]

TOPK = TopK(0.1, dense_below_numel=0)
COMPRESSORS = {
    "topk": TOPK,
    "momentum": TopK(0.1, dense_below_numel=0, momentum_correction=0.9),
    "randomk": RandomK(0.1, dense_below_numel=0),
    "int8": Quantize8(dense_below_numel=0),
    "powersgd": PowerSGD(dense_below_numel=0),
}
BATCHES = 6  # of an epoch


class _Model(Drawn):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Start(pl.Callback):
    """What there is when training begins."""

    residual: dict[str, Tensor]
    plan: MergePlan | None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if isinstance(strategy, MGWFBPStrategy):
            self.plan = None if strategy.session.warmup.running else strategy.session.reducer.plan
            self.residual = residual_of(trainer)


def _fit(
    rank: int,
    strategy: dict[str, Any] | str,
    folder: str = "",
    resume: str | None = None,
    epochs: int = 2,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train two epochs of six steps, saving into `folder` after each step."""
    pl.seed_everything(7, verbose=False)
    module, start = _Model(), _Start()
    given = make_strategy("mgwfbp", **strategy) if isinstance(strategy, dict) else strategy
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(
        strategy=given,
        max_epochs=epochs,
        limit_train_batches=BATCHES,
        enable_checkpointing=bool(folder),
        callbacks=[saving, start] if folder else [start],
        **kwargs,
    )
    trainer.fit(module, ToyData(), ckpt_path=resume)
    if folder:
        trainer.save_checkpoint(f"{folder}/after.ckpt")
        trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    return {"state": module.state_dict(), "start": start, "steps": trainer.global_step}


def _run(rank: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return _fit(rank, *args, **kwargs)


def run(*args: Any, world_size: int = 2, **kwargs: Any) -> list[dict[str, Any]]:
    return train_ranks(_run, args, {"devices": world_size, **kwargs}, world_size=world_size)


@pytest.mark.parametrize(
    ("compressor", "planner"),
    [(TOPK, "wfbp"), *((compressor, "optimal") for compressor in COMPRESSORS.values())],
    ids=["topk by wfbp", *COMPRESSORS],
)
def test_a_resumed_run_ends_with_the_same_bits(
    compressor: Any, planner: str, tmp_path: Path
) -> None:
    """Rests, steps and plan of a checkpoint, at the end of an epoch and within one."""
    kwargs = sparse(compressor, planner=planner)
    whole = run(kwargs, str(tmp_path))
    for step in (BATCHES, 8):
        resumed = run(kwargs, resume=str(tmp_path / f"step={step}.ckpt"))
        for ours, theirs in zip(resumed, whole, strict=True):
            assert ours["steps"] == theirs["steps"] == 2 * BATCHES
            assert ours["start"].plan is not None
            assert any(rest.any() for rest in ours["start"].residual.values())
            assert_same(ours["state"], theirs["state"], f"from step {step}: ")


def test_what_a_checkpoint_holds(tmp_path: Path) -> None:
    """Key "mgwfbp": all ranks' rests and the plan, during fit and after; not beside weights."""
    whole = run(sparse(TOPK), str(tmp_path))
    for name in ("step=12", "after"):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        ranks = saved["mgwfbp"]["exchanger"]
        assert [rank["step"] for rank in ranks] == [12, 12]
        for rank in ranks:
            assert rank["residual"].keys() == whole[0]["state"].keys()
        assert not torch.equal(*(rank["residual"]["side.weight"] for rank in ranks))
        plan = MergePlan.from_json(saved["mgwfbp"]["plan"], "")
        assert len(plan.groups) == 6
        assert 1.0 not in plan.densities
    assert "mgwfbp" not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    in_warm_up = torch.load(tmp_path / "step=2.ckpt", weights_only=True)["mgwfbp"]
    assert in_warm_up["plan"] is None
    assert in_warm_up["exchanger"][1]["residual"]["side.weight"].any()


def test_without_error_feedback_nothing_is_added(tmp_path: Path) -> None:
    """A dense run's checkpoints are Lightning's."""
    run({"planner": "wfbp", "warmup_steps": 3}, str(tmp_path))
    assert "mgwfbp" not in torch.load(tmp_path / "after.ckpt", weights_only=True)


LOW_RANK = PowerSGD(rank=1, dense_below_numel=0)


@pytest.mark.parametrize("second", ["ddp", {}, sparse("bf16"), sparse(LOW_RANK)])
def test_another_strategy_resumes(second: Any, tmp_path: Path) -> None:
    """Rests that the second run has no use for are left alone."""
    run(sparse(TOPK), str(tmp_path), epochs=1)
    first, other = run(second, resume=str(tmp_path / "after.ckpt"))
    assert first["steps"] == 2 * BATCHES
    assert_same(first["state"], other["state"])


@pytest.mark.parametrize("first", ["ddp", sparse(PowerSGD(rank=1, dense_below_numel=0))])
def test_a_compressed_run_resumes_from_another(first: Any, tmp_path: Path) -> None:
    """Without rests it begins with none; PowerSGD's are as good as its own."""
    run(first, str(tmp_path), epochs=1)
    ours = run(sparse(TOPK), resume=str(tmp_path / "after.ckpt"))
    assert_same(ours[0]["state"], ours[1]["state"])
    has_rests = any(rest.any() for rest in ours[0]["start"].residual.values())
    assert has_rests == (first != "ddp")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_mean_of_what_is_left_is_kept_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Two ranks, four, two again."""
    run(sparse(TOPK), str(tmp_path / "two"), epochs=1)
    four = run(
        sparse(TOPK),
        str(tmp_path / "four"),
        resume=str(tmp_path / "two" / "after.ckpt"),
        world_size=4,
    )
    two = run(sparse(TOPK), resume=str(tmp_path / "four" / "after.ckpt"), epochs=3)
    for folder, resumed in (("two", four), ("four", two)):
        saved = torch.load(tmp_path / folder / "after.ckpt", weights_only=True)["mgwfbp"]
        left = [rank["residual"] for rank in saved["exchanger"]]
        taken = [each["start"].residual for each in resumed]
        assert any(rest.any() for rest in left[0].values())
        for name, weight in resumed[0]["state"].items():
            zeros = torch.zeros_like(weight)  # of one that nothing is left of
            before = torch.stack([rank.get(name, zeros) for rank in left]).mean(0)
            now = torch.stack([rank.get(name, zeros) for rank in taken]).mean(0)
            torch.testing.assert_close(now, before, rtol=1e-6, atol=1e-9)
            assert torch.equal(resumed[0]["state"][name], resumed[-1]["state"][name])


@pytest.mark.parametrize("step", [BATCHES, 8])
def test_a_schedule_goes_on_at_its_epoch(step: int, tmp_path: Path) -> None:
    """The epoch that a run is resumed in."""
    compressor = RandomK(0.5, density_schedule=[0.5, 0.1], dense_below_numel=0)
    whole = run(sparse(compressor), str(tmp_path))
    resumed = run(sparse(compressor), resume=str(tmp_path / f"step={step}.ckpt"))
    assert_same(resumed[0]["state"], whole[0]["state"])


def _error(rank: int, path: str) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        _fit(rank, sparse(TOPK), resume=path)
    return str(error.value)


def test_rests_of_another_model_are_an_error_on_every_rank(tmp_path: Path) -> None:
    """Lightning refuses other weights; a rest of another shape is refused by its name."""
    run(sparse(TOPK), str(tmp_path), epochs=1)
    path = tmp_path / "after.ckpt"
    saved = torch.load(path, weights_only=True)
    for rank in saved["mgwfbp"]["exchanger"]:
        rank["residual"]["side.weight"] = torch.zeros(3, 3)
    torch.save(saved, path)
    first, second = train_ranks(_error, str(path))
    assert first == second
    assert "'side.weight'" in first
    assert "another model" in first
    saved["state_dict"]["side.weight"] = torch.zeros(3, 3)
    torch.save(saved, path)
    assert all("size mismatch for side.weight" in error for error in train_ranks(_error, str(path)))
