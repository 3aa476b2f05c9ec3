"""What becomes of each argument of DDPStrategy and DistributedDataParallel: one table.

Most honoured ones are named in `MGWFBPStrategy.__init__`; all others land here.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mgwfbp.exchange.comm_hook import DDPCommHook

_PLANNER_DECIDES = (
    "merge groups are planned; for groups of fixed size give planner=Threshold(nbytes=...)"
)
_ALWAYS_VIEWS = "gradients are always views of the buckets"
_NO_HOOK = "it belongs to a ddp_comm_hook, of which none is given"
_PER_MODEL = "the strategy exchanges the whole model on its own device and process group"

# argument: (value at which it asks for nothing, refused or only of no effect, why and the way out)
TABLE: dict[str, tuple[Any, bool, str]] = {
    "bucket_cap_mb": (None, False, _PLANNER_DECIDES),
    "bucket_cap_mb_list": (None, False, _PLANNER_DECIDES),
    "find_unused_parameters": (
        False,
        False,
        "unused parameters are always found, at no cost: leave it out",
    ),
    "skip_all_reduce_unused_params": (
        False,
        False,
        "unused parameters are always found, at no cost: leave it out",
    ),
    "check_reduction": (False, False, "DistributedDataParallel ignores it as well"),
    "gradient_as_bucket_view": (True, False, _ALWAYS_VIEWS),
    "batched_grad_copy": (False, False, "gradients are always copied a merge group at a time"),
    "dim": (0, False, "it concerns modules on several devices, of which there are none"),
    "ddp_comm_state": (None, False, _NO_HOOK),
    "ddp_comm_wrapper": (None, False, _NO_HOOK),
    "model_averaging_period": (
        None,
        True,
        "ranks exchange gradients at every step; for local SGD use strategy='ddp'",
    ),
    "device_ids": (None, True, _PER_MODEL),
    "output_device": (None, True, _PER_MODEL),
    "process_group": (None, True, _PER_MODEL),
    "device_mesh": (None, True, _PER_MODEL),
    "mixed_precision": (None, True, "give Trainer(precision=...) instead"),
    "delay_all_reduce_named_params": (None, True, "all gradients are exchanged in plan order"),
    "param_to_hook_all_reduce": (None, True, "all gradients are exchanged in plan order"),
}


def take_comm_hook(given: dict[str, Any]) -> DDPCommHook | None:
    """Take DDPStrategy's three arguments of a communication hook out of `given`, as one method."""
    hook = given.pop("ddp_comm_hook", None)
    if hook is None:
        return None
    wrapper = given.pop("ddp_comm_wrapper", None)
    state = given.pop("ddp_comm_state", None)
    return DDPCommHook(hook if wrapper is None else wrapper(hook), state)


def check_ddp_arguments(given: dict[str, Any]) -> None:
    """Refuse what cannot work, warn about what has no effect.

    Raises:
        ValueError: naming the argument, what was got, and the way out.
        TypeError: an argument that neither this strategy nor DistributedDataParallel knows.
    """
    for name, value in given.items():
        if name not in TABLE:
            raise TypeError(f"MGWFBPStrategy got an unexpected keyword argument {name!r}.")
        nothing, refused, why = TABLE[name]
        if value is nothing or value == nothing:
            continue
        if refused:
            raise ValueError(f"`MGWFBPStrategy({name}={value!r})` is not supported: {why}.")
        rank_zero_warn(f"`MGWFBPStrategy({name}={value!r})` has no effect: {why}.")
