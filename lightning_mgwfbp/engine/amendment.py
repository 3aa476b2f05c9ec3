"""What no bucket of an exchange has carried, and who takes part in the next ones.

All ranks come here in the same flush, when one of them has asked for it (`Bucket.noticed`): for a
part that came after its bucket had been sent, for a gradient of a parameter that was frozen or
strided when the plan was made, and where the model's parameters or optimizers have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.layout import Key, split_by_storage
from lightning_mgwfbp.engine.structure import Structure
from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.rows import average_rows
from lightning_mgwfbp.exchange.transport import Transport


@dataclass(frozen=True)
class Amendment:
    """What the ranks agreed on; parameters by name.

    Attributes:
        averages: of the parts that no bucket carried.
        members: who takes part from now on.
        rowwise: whose gradients are sparse.
        changed: those that are others than before, or of another shape.
        kept: those of which all ranks have set an average aside.
    """

    averages: Mapping[str, Tensor]
    members: frozenset[str]
    rowwise: frozenset[str]
    changed: frozenset[str]
    kept: frozenset[str]


@dataclass(frozen=True)
class Beside:
    """What one rank has beside its buckets; parameters by the names that they have by now.

    Attributes:
        late: parts that no bucket carries.
        asides: averages that are set aside; where not all ranks have, they are parts.
        members: who should take part from now on.
        has_changed: whether the structure is another one.
        spoiled: how many buckets had been sent when a backward failed.
    """

    late: Mapping[str, Tensor]
    asides: Mapping[str, Tensor]
    members: Collection[str]
    has_changed: bool
    spoiled: int


def amend(
    transport: Transport, structure: Structure, mine: Beside, rowwise: Collection[str]
) -> Amendment:
    """Average what no bucket carried on some rank. Collective.

    Args:
        transport: joins the ranks.
        structure: knows all parameters.
        mine: this rank's.
        rowwise: whose gradients are known to be sparse.

    Raises:
        RuntimeError, ValueError: on every rank: see `Structure.agree`; or a backward has failed on
            some ranks only.
    """
    sparse = [name for name, part in mine.late.items() if part.is_sparse]
    said = list(mine.late), list(mine.members), sparse, list(mine.asides)
    everyone = transport.all_gather_object((*said, mine.has_changed, mine.spoiled), key="amendment")
    lates, memberships, sparses, aside, changes, spoiled = zip(*everyone, strict=True)
    _require_alike(spoiled)
    changed = structure.agree(transport) if any(changes) else frozenset()
    kept = frozenset(set(mine.asides).intersection(*aside)) - changed
    late = _sums(mine.late, {n: a for n, a in mine.asides.items() if n not in kept})
    named = dict(structure.named)
    agreed_rowwise = (set(rowwise) - changed).union(*sparses)
    agreed_members = {n for n in changed if named[n].requires_grad}.union(*memberships)
    parts = (set().union(*lates) | (set().union(*aside) - kept)) & named.keys()
    averages: dict[str, Tensor] = {}
    with exchange_errors(transport.rank, "gradients outside the plan"):
        for names in split_by_storage(sorted(parts - agreed_rowwise), named):
            bucket = Bucket([named[name] for name in names])
            bucket.pack([late.get(name) for name in names], [name in late for name in names])
            DenseExchanger(transport).start(bucket, key="amendment").finish()
            averages.update(zip(names, bucket.gradients(), strict=True))
        rows = sorted(parts & agreed_rowwise)
        averages.update(average_sparse(transport, named, {name: late.get(name) for name in rows}))
    return Amendment(
        averages,
        frozenset(agreed_members & named.keys()),
        frozenset(agreed_rowwise),
        changed,
        kept,
    )


def _require_alike(spoiled: Sequence[int]) -> None:
    if len(set(spoiled)) > 1:
        raise RuntimeError(
            f"A backward has failed after {' and '.join(map(str, spoiled))} merge groups had been"
            f" sent by ranks 0 to {len(spoiled) - 1}: what the ranks have sent does not belong"
            " together. An error in backward that is caught must be the same on all ranks."
        )


def _sums(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    both = {name: _sum(ours[name], others[name]) for name in ours.keys() & others.keys()}
    return {**ours, **others, **both}


def _sum(one: Tensor, other: Tensor) -> Tensor:
    # nothing strided can be added to a sparse tensor
    return other + one if one.is_sparse else one + other


def average_sparse(
    transport: Transport,
    parameters: Any,
    gradients: Mapping[Key, Tensor | None],
) -> dict[Key, Tensor]:
    """Average gradients that are sparse on some rank, by index or name, the same on all ranks."""
    averages: dict[Key, Tensor] = {}
    for indices in split_by_storage(list(gradients), parameters):
        averages.update(
            zip(
                indices,
                average_rows(
                    [gradients[i] for i in indices],
                    [parameters[i].detach() for i in indices],
                    transport,
                    key="rows",
                ),
                strict=True,
            )
        )
    return averages
