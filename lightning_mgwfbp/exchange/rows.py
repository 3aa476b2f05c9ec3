"""Sparse gradients (`nn.Embedding(sparse=True)`) travel as they are: row numbers and rows.

Ranks touch different numbers of rows; the numbers travel first, then one message each, padded to
the longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mgwfbp.exchange import messages
from lightning_mgwfbp.exchange.transport import Transport


def average_rows(
    gradients: Sequence[Tensor | None],
    parameters: Sequence[Tensor],
    transport: Transport,
    *,
    key: str,
) -> list[Tensor]:
    """Return the mean over the ranks of each gradient, sparse and coalesced. Collective.

    Args:
        gradients: this rank's, sparse (strided ones are made so), None for zeros; (N,).
        parameters: theirs, all on one device, the same on all ranks; (N,).
        transport: carries the messages.
        key: names the exchange.
    """
    mine = [_rows(g, p) for g, p in zip(gradients, parameters, strict=True)]
    for rows in mine:
        rows.values().mul_(1.0 / transport.world_size)
    counts = torch.tensor([rows._nnz() for rows in mine], device=parameters[0].device)
    everyones_counts = counts.new_empty((transport.world_size, len(mine)))
    transport.all_gather(everyones_counts, counts, key=f"{key} counts").wait()
    likes = [_like(theirs, mine) for theirs in everyones_counts.tolist()]
    message = messages.join([part for rows in mine for part in (rows.indices(), rows.values())])
    # never of no bytes, which no view could be cut from
    longest = max(8, *(messages.nbytes(like) for like in likes))
    padded = torch.nn.functional.pad(message, (0, longest - message.numel()))
    received = padded.new_empty((transport.world_size, longest))
    transport.all_gather(received, padded, key=f"{key} rows").wait()
    parts = [messages.take_apart(m, like) for m, like in zip(received, likes, strict=True)]
    return [
        torch.sparse_coo_tensor(
            torch.cat([theirs[2 * n] for theirs in parts], dim=1),
            torch.cat([theirs[2 * n + 1] for theirs in parts]),
            rows.shape,
            check_invariants=False,
        ).coalesce()
        for n, rows in enumerate(mine)
    ]


def _rows(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A coalesced copy whose rows, and nothing finer, may be missing."""
    if gradient is None:
        no_rows = torch.empty((1, 0), dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            no_rows,
            parameter.new_empty((0, *parameter.shape[1:])),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )
    if gradient.layout is torch.strided or gradient.sparse_dim() != 1:
        return gradient.to_dense().to_sparse(1)
    return gradient.coalesce().clone()


def _like(counts: Sequence[int], mine: Sequence[Tensor]) -> list[Tensor]:
    """What a rank that has `counts` rows of each gradient has joined: tensors without memory."""
    return [
        torch.empty(shape, dtype=dtype, device="meta")
        for count, rows in zip(counts, mine, strict=True)
        for shape, dtype in (
            ((1, count), torch.int64),
            ((count, *rows.shape[1:]), rows.dtype),
        )
    ]
