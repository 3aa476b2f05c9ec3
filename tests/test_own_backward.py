"""A failure here is a backward of the user's own that is exchanged, or that spoils an exchange."""

from __future__ import annotations

from typing import Any

import pytest
from own_backward import EVERYWHERE, UNDER_DEFERRED_STEPS, fit_with_own_backwards
from ranks import train_ranks
from training import assert_same, sparse

from lightning_mgwfbp import PowerSGD, Quantize8, TopK

pytestmark = pytest.mark.slow

FINE: dict[str, Any] = {"planner": "wfbp", "warmup_steps": 3}
DENSE = {
    "mgwfbp": FINE,
    "mgwfbp_cross_iteration": FINE,
    "mgwfbp_horovod": FINE,
}
SPARSE = {
    "topk": TopK(density=0.1, dense_below_numel=20),
    "int8": Quantize8(dense_below_numel=20),
    "powersgd": PowerSGD(rank=1, dense_below_numel=20),
}


def fit(strategy: str, strategy_kwargs: dict[str, Any], **module: Any) -> list[dict[str, Any]]:
    ranks = train_ranks(_fit, strategy, strategy_kwargs, module)
    assert_same(ranks[0]["state"], ranks[1]["state"], "rank 0 and 1: ")
    for rank, result in enumerate(ranks):
        assert result["wrong"] == []
        assert bool(result["pictures"]) == (rank in module.get("ranks", (0, 1)))
    return ranks


def _fit(rank: int, strategy: str, kwargs: dict[str, Any], module: dict[str, Any]) -> Any:
    return fit_with_own_backwards(rank, strategy, kwargs, **module)


def where(strategy: str) -> tuple[str, ...]:
    return UNDER_DEFERRED_STEPS if strategy == "mgwfbp_cross_iteration" else EVERYWHERE


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=[pytest.mark.horovod] if "horovod" in s else []) for s in DENSE],
)
@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=["all ranks", "rank 0"])
def test_weights_are_ddps(strategy: str, ranks: tuple[int, ...]) -> None:
    """Some of what an attack or a picture has left is averaged, or one rank's message meets
    another's; before the plan (from step 0 on) or after it."""
    for first_step in (0, 6):
        module = {"where": where(strategy), "ranks": ranks, "first_step": first_step}
        ours, theirs = fit(strategy, DENSE[strategy], **module), fit("ddp", {}, **module)
        assert_same(ours[0]["state"], theirs[0]["state"])


@pytest.mark.parametrize("compressor", SPARSE.values(), ids=SPARSE)
def test_compressed_as_if_the_network_had_been_copied(compressor: Any) -> None:
    """What a backward of the user's own has left is kept as a residual, or sent."""
    for ranks in ((0, 1), (0,)):
        module = {"where": EVERYWHERE, "ranks": ranks, "momentum": 0.0}
        ours = fit("mgwfbp", sparse(compressor), **module)
        other = fit("mgwfbp", sparse(compressor), on_copy=True, **module)
        assert_same(ours[0]["state"], other[0]["state"])


def test_by_manual_optimization() -> None:
    """manual_backward is training's own, backward in the same training_step is not."""
    module = {"where": ("attack", "on_train_batch_end", "validation_step"), "by_hand": True}
    for ranks in ((0, 1), (0,)):
        ours = fit("mgwfbp", FINE, ranks=ranks, **module)
        theirs = fit("ddp", {}, ranks=ranks, **module)
        assert_same(ours[0]["state"], theirs[0]["state"])


@pytest.mark.parametrize("strategy", ["mgwfbp", "mgwfbp_cross_iteration"])
def test_groups_are_launched_in_backward_all_the_same(strategy: str) -> None:
    """One attack in the warm-up has each parameter expected twice for ever: no overlap is left."""
    attacked = fit(strategy, FINE, where=("attack",), ranks=(0, 1))
    plain = fit(strategy, FINE, where=("validation_step",), ranks=(0, 1))
    launched = [ranks[0]["launched in backward"] for ranks in (attacked, plain)]
    assert launched[0] == launched[1] > 0
