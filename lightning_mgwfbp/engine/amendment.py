"""What no bucket of an exchange has carried, and who takes part in the next ones.

All ranks come here in the same flush, when one of them has asked for it (`Bucket.noticed`): for a
part that came after its bucket had been sent, for a gradient of a parameter that was frozen or
strided when the plan was made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.layout import split_by_storage
from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.rows import average_rows
from lightning_mgwfbp.exchange.transport import Transport


@dataclass(frozen=True)
class Amendment:
    """What the ranks agreed on; parameters by index.

    Attributes:
        averages: of the parts that no bucket carried.
        members: who takes part from now on.
        rowwise: whose gradients are sparse.
    """

    averages: Mapping[int, Tensor]
    members: frozenset[int]
    rowwise: frozenset[int]


def amend(
    transport: Transport,
    parameters: Sequence[nn.Parameter],
    late: Mapping[int, Tensor],
    members: Sequence[int],
    rowwise: Collection[int],
) -> Amendment:
    """Average what no bucket carried on some rank. Collective.

    Args:
        transport: joins the ranks.
        parameters: of the whole model, (N,).
        late: this rank's parts, by index.
        members: who should take part from now on, as this rank sees it.
        rowwise: whose gradients are known to be sparse.
    """
    sparse = {i for i, part in late.items() if part.is_sparse}
    everyone = transport.all_gather_object((sorted(late), members, sparse), key="amendment")
    agreed_rowwise = frozenset(rowwise).union(*(theirs for _, _, theirs in everyone))
    parts = sorted({i for theirs, _, _ in everyone for i in theirs})
    strided = [i for i in parts if i not in agreed_rowwise]
    averages: dict[int, Tensor] = {}
    with exchange_errors(transport.rank, "gradients outside the plan"):
        for indices in split_by_storage(strided, parameters):
            bucket = Bucket([parameters[i] for i in indices])
            bucket.pack([late.get(i) for i in indices], [i in late for i in indices])
            DenseExchanger(transport).start(bucket, key="amendment").finish()
            averages.update(zip(indices, bucket.gradients(), strict=True))
        rows = [i for i in parts if i in agreed_rowwise]
        averages.update(average_sparse(transport, parameters, {i: late.get(i) for i in rows}))
    return Amendment(
        averages, frozenset(i for _, theirs, _ in everyone for i in theirs), agreed_rowwise
    )


def average_sparse(
    transport: Transport,
    parameters: Sequence[nn.Parameter],
    gradients: Mapping[int, Tensor | None],
) -> dict[int, Tensor]:
    """Average gradients that are sparse on some rank, by index, the same ones on all ranks."""
    averages: dict[int, Tensor] = {}
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
