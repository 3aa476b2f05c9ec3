"""Ranks cannot disagree: what each believes is compared before any gradient is exchanged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch import nn

from lightning_mgwfbp.exchange.transport import Transport


def require_agreement(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compare `facts` over all ranks; a hash travels, the facts themselves only on a difference.

    Raises:
        RuntimeError: on every rank alike, naming the first fact that differs, and how.
    """
    listed = list(facts.items())
    digest = hashlib.sha256(repr(listed).encode()).digest()
    if len(set(transport.all_gather_object(digest, key="agreement"))) == 1:
        return
    everyone = transport.all_gather_object(listed, key="agreement_facts")
    for rank, theirs in enumerate(everyone[1:], start=1):
        difference = _first_difference(everyone[0], theirs)
        if difference is not None:
            name, ours, other = difference
            raise RuntimeError(
                f"The ranks disagree: {name} is {ours} on rank 0 and {other} on rank {rank}."
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


def parameter_facts(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Describe parameters for `require_agreement`: order, shape, strides, dtype, whether frozen."""
    facts = {"the number of parameters": str(len(named_parameters))}
    for index, (name, p) in enumerate(named_parameters):
        facts[f"parameter {name!r}"] = (
            f"number {index}, shape {tuple(p.shape)}, strides {p.stride()}, {p.dtype},"
            f" requires_grad={p.requires_grad}"
        )
    return facts
