"""What an exchange leaves behind, in a checkpoint: every rank's rests, and the plan.

The plan goes with them, since what a merge group selects depends on what it holds: only with the
same groups does a resumed run end with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.exchangers import all_finite
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import MergePlan
from lightning_mgwfbp.plan.records import (
    located,
    pick,
    require_count,
    require_list,
    require_text,
    shown,
)

STATE = "mgwfbp"  # key in a checkpoint
WHERE = f"checkpoint[{STATE!r}]"
_SHAPED = ("residual", "velocity")  # as their parameters are
_FOREIGN = "it was saved for another model"


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


@dataclass(frozen=True)
class SavedState:
    """What `ExchangeState.gathered` gave, read back and found right.

    Attributes:
        exchanger: every rank's, (ranks,).
        plan, rowwise, made_for: as in `ExchangeState`.
    """

    exchanger: list[dict[str, Any]]
    plan: MergePlan | None
    rowwise: list[str]
    made_for: dict[str, str]

    @classmethod
    def checked(cls, saved: object, parameters: Mapping[str, Tensor]) -> SavedState:
        """Read `saved`, from a checkpoint which may be damaged, or another model's.

        Args:
            saved: anything.
            parameters: all of the model's, by name.

        Raises:
            ValueError: naming what is wrong.
        """
        with located(WHERE):
            fields = pick(saved, ("exchanger", "plan", "rowwise", "made_for"))
            states = fields["exchanger"]
            require_list("exchanger", states)
            if not states:
                raise ValueError("exchanger must have a state for each rank, got none")
            for rank, state in enumerate(states):
                with located(f"exchanger[{rank}]"):
                    _check_state(state, parameters)
            _check_same_kinds(states)
            require_list("rowwise", fields["rowwise"])
            for name in fields["rowwise"]:
                require_text("rowwise", name)
                _require_known("rowwise", name, parameters)
            made_for = fields["made_for"]
            if not isinstance(made_for, Mapping):
                raise ValueError(f"made_for must be a mapping, got {shown(made_for)}")
            for part in (*made_for, *made_for.values()):
                require_text("made_for", part)
            return cls(list(states), _plan(fields["plan"]), list(fields["rowwise"]), dict(made_for))


def _plan(text: object) -> MergePlan | None:
    if text is None:
        return None
    require_text("plan", text)
    assert isinstance(text, str)
    return MergePlan.from_json(text, "plan")


def _check_state(state: object, parameters: Mapping[str, Tensor]) -> None:
    """Hold one rank's to what `Exchanger.state_dict` gives: a step, tensors by kind and name."""
    if not isinstance(state, Mapping):
        raise ValueError(f"must be a mapping, got {shown(state)}")
    for kind, value in state.items():
        require_text("a key", kind)
        if kind == "step":
            require_count("step", value)
            continue
        if not isinstance(value, Mapping):
            raise ValueError(f"{kind} must be a mapping, got {shown(value)}")
        for name, tensor in value.items():
            require_text(f"a key of {kind}", name)
            _require_known(kind, name, parameters)
            like = parameters[name]
            _check_tensor(f"the {kind} of {name!r}", tensor, like)
            if kind in _SHAPED and tensor.shape != like.shape:
                raise ValueError(
                    f"the {kind} of {name!r} has shape {tuple(tensor.shape)}, but the parameter"
                    f" {tuple(like.shape)}: {_FOREIGN}"
                )


def _check_tensor(what: str, tensor: object, like: Tensor) -> None:
    is_number = (
        isinstance(tensor, Tensor)
        and tensor.layout == torch.strided
        and (tensor.is_floating_point() or tensor.is_complex())
    )
    if not is_number:
        got = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, Tensor) else shown(tensor)
        raise ValueError(f"{what} must be a tensor of floating-point numbers, got {got}")
    assert isinstance(tensor, Tensor)
    if tensor.is_complex() != like.is_complex():
        raise ValueError(f"{what} is {tensor.dtype}, but the parameter {like.dtype}: {_FOREIGN}")
    if not all_finite(tensor):
        raise ValueError(f"{what} has infinite numbers or NaN")


def _check_same_kinds(states: Sequence[Mapping[str, Any]]) -> None:
    """What ranks keep of one parameter must go together, for another number of ranks folds it."""
    shapes: dict[tuple[str, str], torch.Size] = {}
    for rank, state in enumerate(states):
        if state.get("step") != states[0].get("step"):
            raise ValueError(
                f"exchanger[{rank}]: step is {state.get('step')}, but {states[0].get('step')} of"
                " rank 0"
            )
        for kind, rests in state.items():
            for name, tensor in rests.items() if kind != "step" else ():
                if tensor.shape != shapes.setdefault((kind, name), tensor.shape):
                    raise ValueError(
                        f"exchanger[{rank}]: the {kind} of {name!r} has shape"
                        f" {tuple(tensor.shape)}, but {tuple(shapes[kind, name])} of another rank"
                    )


def _require_known(what: str, name: str, parameters: Mapping[str, Tensor]) -> None:
    if name not in parameters:
        raise ValueError(f"{what} names {name!r}, which is no parameter here: {_FOREIGN}")
