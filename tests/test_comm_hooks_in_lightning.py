"""A failure here means: DDPStrategy's communication hooks do not do here what they do under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from ranks import train_ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from training import assert_same, train

from lightning_mgwfbp import DDPCommHook, MGWFBPStrategy

WFBP = {"planner": "wfbp", "warmup_steps": 3}


def _train(rank: int, strategy: str, kwargs: dict[str, Any]) -> Any:
    return train(rank, strategy, model="digits", steps=8, strategy_kwargs=kwargs)


@pytest.mark.slow
def test_the_all_reduce_hook_is_ddp() -> None:
    """A hook that averages by itself."""
    ours = train_ranks(_train, "mgwfbp", {"ddp_comm_hook": default_hooks.allreduce_hook, **WFBP})
    theirs = train_ranks(_train, "ddp", {})
    for mine, ddps in zip(ours, theirs, strict=True):
        assert_same(mine["state"], ddps["state"])
    assert len(ours[0]["plan"].groups) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"ddp_comm_hook": default_hooks.fp16_compress_hook},
        {
            "ddp_comm_hook": default_hooks.allreduce_hook,
            "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper,
        },
    ],
    ids=["hook", "wrapper"],
)
def test_ddps_arguments_make_a_hook(arguments: dict[str, Any]) -> None:
    """ddp_comm_hook, ddp_comm_wrapper: as compressor=DDPCommHook(...)."""
    ours, other = train_ranks(_train, "mgwfbp", {**arguments, **WFBP})
    written = {"compressor": DDPCommHook(default_hooks.fp16_compress_hook), **WFBP}
    hook, _ = train_ranks(_train, "mgwfbp", written)
    plain, _ = train_ranks(_train, "mgwfbp", WFBP)
    for name, value in ours["gradients"][-1].items():
        assert value.equal(other["gradients"][-1][name])
    assert_same(ours["state"], hook["state"])
    assert not ours["state"]["network.6.weight"].equal(plain["state"]["network.6.weight"])


def _train_powersgd(rank: int) -> Any:
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4, min_compression_rate=1)
    hook = {"ddp_comm_hook": powerSGD_hook.powerSGD_hook, "ddp_comm_state": state}
    return _train(rank, "mgwfbp", {**hook, **WFBP})


@pytest.mark.slow
def test_a_hook_with_state() -> None:
    """ddp_comm_state: PowerSGD's, which begins after the plan is made."""
    ours, other = train_ranks(_train_powersgd)
    theirs, _ = train_ranks(_train, "ddp", {})
    for step in range(8):
        for name, value in ours["gradients"][step].items():
            assert value.equal(other["gradients"][step][name])
            assert value.equal(theirs["gradients"][step][name]) or step >= 3
    assert not ours["state"]["network.6.weight"].equal(theirs["state"]["network.6.weight"])


@pytest.mark.parametrize("compressor", ["topk", "fp16", DDPCommHook(default_hooks.allreduce_hook)])
def test_a_hook_beside_a_compressor_is_refused(compressor: Any) -> None:
    """Both say how gradients travel."""
    with pytest.raises(ValueError, match=r"ddp_comm_hook=.*compressor="):
        MGWFBPStrategy(ddp_comm_hook=default_hooks.allreduce_hook, compressor=compressor)


@pytest.mark.parametrize("hook", [dist.BuiltinCommHookType.ALLREDUCE, "fp16_compress_hook", 3])
def test_what_is_not_a_python_function_is_refused(hook: Any) -> None:
    """DDP's C++ hooks among it, with the way out."""
    with pytest.raises(ValueError, match="default_hooks"):
        MGWFBPStrategy(ddp_comm_hook=hook)


@pytest.mark.parametrize(
    "argument",
    [{"ddp_comm_state": object()}, {"ddp_comm_wrapper": default_hooks.fp16_compress_wrapper}],
)
def test_what_belongs_to_a_hook_needs_one(argument: dict[str, Any]) -> None:
    """A state or a wrapper alone has no effect."""
    with pytest.warns(UserWarning, match="has no effect: it belongs to a ddp_comm_hook"):
        MGWFBPStrategy(**argument)
