"""A failure here means: training is no longer what it is under strategy="ddp"."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import train_ranks
from training import assert_same, train

# more groups than one, so that order, overlap and the last bucket all matter
WFBP = {"planner": "wfbp", "warmup_steps": 3}


def both(ours: dict[str, Any] | None = None, oracle: str = "ddp", **kwargs: Any) -> Any:
    """Results of rank 0 and 1 under mgwfbp and under DDP."""
    world_size = kwargs.pop("world_size", 2)
    mgwfbp = train_ranks(
        _train, "mgwfbp", {"strategy_kwargs": ours or WFBP, **kwargs}, world_size=world_size
    )
    ddp = train_ranks(_train, oracle, kwargs, world_size=world_size)
    return mgwfbp, ddp


def _train(rank: int, strategy: str, kwargs: dict[str, Any]) -> Any:
    return train(rank, strategy, **kwargs)


@pytest.mark.parametrize("model", ["digits", pytest.param("gpt", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "trainer_kwargs",
    [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 0.05}],
    ids=["plain", "accumulate", "clip"],
)
def test_weights_and_losses_are_bit_equal(model: str, trainer_kwargs: dict[str, Any]) -> None:
    """Dense exchange, buffers, clipping or accumulation, across the end of the warm-up."""
    mgwfbp, ddp = both(model=model, **trainer_kwargs)
    for ours, theirs in zip(mgwfbp, ddp, strict=True):
        assert ours["steps"] == theirs["steps"] == 20
        assert_same(ours["state"], theirs["state"], f"{model}: ")
        assert len(ours["losses"]) == len(theirs["losses"]) >= 20
        assert all(map(torch.equal, ours["losses"], theirs["losses"]))
    assert len(mgwfbp[0]["plan"].groups) > 3


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["auto", "single", "threshold", "mgwfbp"])
def test_every_planner_gives_the_same_weights(planner: str) -> None:
    """Merge groups of any shape."""
    mgwfbp, ddp = both({"planner": planner, "warmup_steps": 3}, model="gpt")
    assert_same(mgwfbp[0]["state"], ddp[0]["state"])
    assert mgwfbp[0]["plan"] == mgwfbp[1]["plan"]


def unused_everywhere_at_times(batch_idx: int, rank: int) -> bool:
    return batch_idx % 3 != 2


def unused_on_one_rank_at_times(batch_idx: int, rank: int) -> bool:
    return batch_idx % 2 == rank


@pytest.mark.parametrize("use", [unused_everywhere_at_times, unused_on_one_rank_at_times])
def test_unused_parameters_are_found_without_a_flag(use: Any) -> None:
    """Usage flags; a gradient of None stays None."""
    mgwfbp, ddp = both(oracle="ddp_find_unused_parameters_true", model_kwargs={"use": use})
    for ours, theirs in zip(mgwfbp, ddp, strict=True):
        assert_same(ours["state"], theirs["state"])
        assert [g.keys() for g in ours["gradients"]] == [g.keys() for g in theirs["gradients"]]


@pytest.mark.parametrize(
    ("precision", "rtol"), [("64-true", 1e-14), ("bf16-true", 2e-2), ("bf16-mixed", 2e-2)]
)
def test_other_precisions_stay_within_their_rounding(precision: str, rtol: float) -> None:
    """Buckets of other dtypes, autocast."""
    mgwfbp, ddp = both(model="toy", steps=8, precision=precision)
    for name, ours in mgwfbp[0]["state"].items():
        theirs = ddp[0]["state"][name]
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_four_ranks_differ_by_rounding_only(optimizer: str) -> None:
    """The order of sums is the only freedom; Adam magnifies rounding, so one step is compared."""
    steps = 20 if optimizer == "sgd" else 1
    warmup = {"planner": "wfbp", "warmup_steps": 3}
    mgwfbp, ddp = both(
        warmup, steps=steps, model_kwargs={"optimizer": optimizer}, devices=4, world_size=4
    )
    if optimizer == "sgd":
        for name, ours in mgwfbp[0]["state"].items():
            torch.testing.assert_close(ours, ddp[0]["state"][name], rtol=2e-6, atol=2e-6)
    for name, ours in mgwfbp[0]["gradients"][0].items():
        theirs = ddp[0]["gradients"][0][name]
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(("compressor", "epsilon"), [("fp16", 2**-11), ("bf16", 2**-8)])
def test_narrow_wire_formats_round_once_per_rank(compressor: str, epsilon: float) -> None:
    """The wire format; gradients stay float32 and equal on all ranks."""
    mgwfbp, ddp = both({"compressor": compressor, **WFBP}, steps=1)
    for name, ours in mgwfbp[0]["gradients"][0].items():
        theirs = ddp[0]["gradients"][0][name]
        assert ours.dtype == torch.float32
        assert torch.equal(ours, mgwfbp[1]["gradients"][0][name])
        assert not torch.equal(ours, theirs)
        # each addend is rounded once, and so is the sum
        torch.testing.assert_close(ours, theirs, rtol=4 * epsilon, atol=4 * epsilon * 0.05)
