"""Ranks cannot disagree: what each believes is compared before any gradient is exchanged.

A belief is a list of facts, pairs of a name and a text; `facts_of` makes them of any value.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.fingerprint import fingerprint
from lightning_mgwfbp.exchange.broadcast import stored_once
from lightning_mgwfbp.exchange.compressors import Compressor
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import Planner

Facts = Mapping[str, str]

# One release computes as another build of it does, to which a local version ("+cpu") belongs.
_PACKAGES = ("lightning-mgwfbp", "torch", "lightning")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_SHOWN = 200


def require_agreement(transport: Transport, facts: Facts) -> None:
    """Compare `facts` over all ranks; a hash travels, the facts themselves only on a difference.

    Raises:
        RuntimeError: on every rank alike, naming the first fact that differs, and how; or a rank
            has ended meanwhile.
    """
    listed = list(facts.items())
    digest = hashlib.sha256(repr(listed).encode(errors="backslashreplace")).digest()
    with exchange_errors(transport.rank, "what all ranks must have in common"):
        if len(set(transport.all_gather_object(digest, key="agreement"))) == 1:
            return
        everyone = transport.all_gather_object(listed, key="agreement_facts")
    for rank, theirs in enumerate(everyone[1:], start=1):
        difference = _first_difference(everyone[0], theirs)
        if difference is not None:
            name, ours, other = difference
            raise RuntimeError(
                f"The ranks disagree: {name} is {ours:.{_MOST_SHOWN}} on rank 0 and"
                f" {other:.{_MOST_SHOWN}} on rank {rank}."
                " All ranks must build the same model and be given the same options."
            )
    raise AssertionError("hashes differed, facts did not")


def _first_difference(
    ours: Sequence[tuple[str, str]], theirs: Sequence[tuple[str, str]]
) -> tuple[str, str, str] | None:
    others = dict(theirs)
    for name, value in ours:
        if others.get(name) != value:
            return name, value, others.get(name, "missing")
    known = dict(ours)
    extra = [(name, "missing", value) for name, value in theirs if name not in known]
    return extra[0] if extra else None


def require_success(transport: Transport, error: Exception | None) -> None:
    """Have an error of one rank end all of them; collective, None from those that have none.

    Raises:
        ValueError: on every rank alike, with the first rank's text.
    """
    text = None if error is None else str(error)
    with exchange_errors(transport.rank, "whether all ranks could go on"):
        everyone = transport.all_gather_object(text, key="success")
    said = [(rank, text) for rank, text in enumerate(everyone) if text is not None]
    if said:
        rank, text = said[0]
        where = "" if len(said) == transport.world_size else f"On rank {rank}: "
        raise ValueError(f"{where}{text}") from error


def why_not_exchangeable(tensor: Tensor) -> str | None:
    """Say why ranks cannot send each other `tensor`; None: they can."""
    if is_lazy(tensor):
        return "not initialized"
    return None if tensor.layout is torch.strided else f"of layout {tensor.layout}"


def require_exchangeable(kind: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse what ranks cannot send each other, after `require_agreement`: so all ranks do.

    Args:
        kind: "Parameter" or "Buffer".
        named: those on which the ranks agree.

    Raises:
        ValueError: naming the first one, why, and the way out.
    """
    for name, tensor in named:
        why = why_not_exchangeable(tensor)
        if why is None:
            continue
        if is_lazy(tensor):
            way_out = "Run a batch through the model before training, which gives it its shape."
        else:
            way_out = (
                "Keep it dense (`.to_dense()`), or have each rank keep its own: list its name in"
                " the model's `_ddp_params_and_buffers_to_ignore`."
            )
        raise ValueError(f"{kind} {name!r} is {why}, and cannot be exchanged. {way_out}")


def facts_of(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Take `value` apart into facts that are the same on all ranks where their values are.

    Records, planners and compressors are compared field by field, containers part by part, tensors
    by all of their bits; of any other object what it says of itself, but for its address.
    """
    kind = type(value).__qualname__
    if isinstance(value, Tensor):
        bits = int(fingerprint(value)) % 2**64
        yield name, f"{kind} of {tuple(value.shape)}, {value.dtype}, bits {bits:016x}"
        return
    parts = _fields(value)
    if parts is not None:
        yield name, kind
    elif (parts := _items(value)) is not None:
        yield name, f"{kind} of length {len(parts)}"
    else:
        yield name, _ADDRESS.sub("", repr(value))
        return
    for part, content in parts.items():
        yield from facts_of(f"{name}{part}", content)


def _fields(value: Any) -> dict[str, object] | None:
    if is_dataclass(value) and not isinstance(value, type) and _repr_is_made(value):
        return {f".{field.name}": getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Planner | Compressor):  # a user's own, which is no dataclass
        return {f".{key}": part for key, part in vars(value).items()}
    return None


def _repr_is_made(record: Any) -> bool:
    # one that says by itself what it is, with `repr=False`, holds what may differ
    return bool(record.__dataclass_params__.repr)


def _items(value: object) -> dict[str, object] | None:
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # whose own order is each process's
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    return None


def version_facts() -> dict[str, str]:
    """Describe what computes gradients and exchanges them. Planning is done on rank 0 alone."""
    return {f"the version of {name}": version(name).partition("+")[0] for name in _PACKAGES}


def parameter_facts(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Describe parameters: order, shape, strides, dtype, kind of device, whether frozen; of those
    that `require_exchangeable` will refuse, why."""
    facts = {"the number of parameters": str(len(named_parameters))}
    for index, (name, p) in enumerate(named_parameters):
        described = why_not_exchangeable(p) or f"shape {tuple(p.shape)}, strides {p.stride()}"
        facts[f"parameter {name!r}"] = (
            f"number {index}, {described}, {p.dtype}, on {p.device.type},"
            f" requires_grad={p.requires_grad}"
        )
    return facts


def buffer_facts(named_buffers: Sequence[tuple[str, Tensor]]) -> dict[str, str]:
    """Describe buffers: what of each would be sent, or why it cannot be."""
    facts = {"the number of buffers": str(len(named_buffers))}
    for name, buffer in named_buffers:
        described = why_not_exchangeable(buffer) or _stored_shape(buffer)
        facts[f"buffer {name!r}"] = f"{described}, {buffer.dtype}"
    return facts


def _stored_shape(buffer: Tensor) -> str:
    stored = stored_once(buffer)
    is_whole = stored.numel() == buffer.numel()
    expanded = "" if is_whole else f" expanded from {tuple(stored.shape)}"
    return f"shape {tuple(buffer.shape)}{expanded}"


def optimizer_facts(
    optimizers: Sequence[Optimizer], named_parameters: Sequence[tuple[str, nn.Parameter]]
) -> dict[str, str]:
    """Describe optimizers: their classes, what each steps, and with which options."""
    names = {id(p): name for name, p in named_parameters}
    facts = {"the number of optimizers": str(len(optimizers))}
    for number, optimizer in enumerate(optimizers):
        which = f"optimizer {number}"
        facts[which] = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        for group, options in enumerate(optimizer.param_groups):
            stepped = [names.get(id(p), "not exchanged") for p in options["params"]]
            others = {key: value for key, value in options.items() if key != "params"}
            facts.update(facts_of(f"{which}'s param_groups[{group}]", others))
            facts.update(facts_of(f"{which}'s param_groups[{group}]['params']", stepped))
        facts[f"the number of {which}'s param_groups"] = str(len(optimizer.param_groups))
    return facts
