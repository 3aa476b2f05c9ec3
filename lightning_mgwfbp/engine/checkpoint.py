"""What an exchange leaves behind, in a checkpoint: every rank's rests, and the plan.

The plan goes with them, since what a merge group selects depends on what it holds: only with the
same groups does a resumed run end with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_mgwfbp.exchange.exchangers import all_finite
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import MergePlan


@dataclass(frozen=True)
class ExchangeState:
    """One rank's.

    Attributes:
        exchanger: what `Exchanger.state_dict` gave.
        plan: the plan in force, None before one was made.
        rowwise: names of the parameters whose gradients are sparse.
        made_for: what the plan depends on beside the model.
    """

    exchanger: Mapping[str, Any]
    plan: MergePlan | None
    rowwise: list[str]
    made_for: Mapping[str, str]

    def gathered(self, transport: Transport) -> dict[str, Any] | None:
        """Return what `Session.resume` takes, on rank 0; None elsewhere, or if nothing was left.

        Collective, a tensor at a time. Plain types and tensors on the CPU (loadable with
        weights_only=True), of the size of the parameters, once for each rank.
        """
        if not self.exchanger:
            return None
        states: list[dict[str, Any]] = [{} for _ in range(transport.world_size)]
        for kind, value in self.exchanger.items():
            if not isinstance(value, Mapping):  # the same on all ranks
                for state in states:
                    state[kind] = value
                continue
            for state in states:
                state[kind] = {}
            # a rank may have nothing left of a parameter of which another one has
            everyones = transport.all_gather_object(list(value), key="exchange state names")
            for name in sorted(set().union(*everyones)):
                theirs = transport.gather_object(value.get(name), 0, key="exchange state")
                for state, part in zip(states, theirs or (), strict=theirs is not None):
                    if part is not None:
                        state[kind][name] = part
        if transport.rank != 0:
            return None
        return {
            "exchanger": states,
            "plan": None if self.plan is None else self.plan.to_json(),
            "rowwise": self.rowwise,
            "made_for": dict(self.made_for),
        }


def check(saved: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Hold what should have come from `gathered` to what it must be; the same on all ranks.

    Args:
        saved: from a checkpoint, which may be damaged.
        shapes: of all parameters, by name.

    Raises:
        ValueError: naming what is wrong.
    """
    where = "checkpoint['mgwfbp']"
    for key in ("exchanger", "plan", "rowwise", "made_for"):
        if not isinstance(saved, Mapping) or key not in saved:
            raise ValueError(f"{where} is damaged: it has no {key!r}.")
    states = saved["exchanger"]
    if not isinstance(states, list) or not states:
        raise ValueError(f"{where} is damaged: it holds no rank's residuals.")
    for rank, state in enumerate(states):
        if not isinstance(state, Mapping) or not isinstance(state.get("step", 0), int):
            raise ValueError(f"{where} is damaged: rank {rank} has no state.")
        for kind in ("residual", "velocity"):
            for name, tensor in state.get(kind, {}).items():
                what = f"{where}: the {kind} of {name!r} on rank {rank}"
                if not isinstance(tensor, Tensor) or not all_finite(tensor):
                    raise ValueError(f"{what} is damaged.")
                if name in shapes and tuple(tensor.shape) != shapes[name]:
                    raise ValueError(
                        f"{what} has shape {tuple(tensor.shape)}, but the parameter"
                        f" {shapes[name]}: it was saved for another model."
                    )
