"""What no bucket of an exchange has carried, and who takes part in the next ones.

All ranks come here in the same flush, when one of them has asked for it (`Bucket.noticed`): for a
part that came after its bucket had been sent, for a gradient of a parameter that was frozen or
strided when the plan was made, and where the model's parameters or optimizers have changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


def amend(
    transport: Transport,
    structure: Structure,
    has_changed: bool,
    late: Mapping[str, Tensor],
    asides: Mapping[str, Tensor],
    members: Collection[str],
    rowwise: Collection[str],
) -> Amendment:
    """Average what no bucket carried on some rank. Collective.

    Args:
        transport: joins the ranks.
        structure: knows all parameters.
        has_changed: whether it is another one now, as this rank sees it.
        late: this rank's parts, by name.
        asides: averages that this rank has set aside; where not all ranks have, they are parts.
        members: who should take part from now on, as this rank sees it.
        rowwise: whose gradients are known to be sparse.

    Raises:
        RuntimeError, ValueError: on every rank: see `Structure.agree`.
    """
    sparse = [name for name, part in late.items() if part.is_sparse]
    mine = list(late), list(members), sparse, has_changed, list(asides)
    everyone = transport.all_gather_object(mine, key="amendment")
    lates, memberships, sparses, changes, aside = zip(*everyone, strict=True)
    changed = structure.agree(transport) if any(changes) else frozenset()
    kept = frozenset(set(asides).intersection(*aside)) - changed
    late = _sums(late, {n: a for n, a in asides.items() if n not in kept})
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


def _sums(ours: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    both = {name: others[name] + ours[name] for name in ours.keys() & others.keys()}
    return {**ours, **others, **both}


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
