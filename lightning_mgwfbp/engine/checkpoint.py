"""What an exchange leaves behind, in a checkpoint: every rank's rests, and the plan.

The plan goes with them, since what a merge group selects depends on what it holds: only with the
same groups does a resumed run end with the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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

        Collective. Plain types and tensors on the CPU (loadable with weights_only=True): all that
        is compressed, once for each rank.
        """
        if not self.exchanger:
            return None
        ranks: list[dict[str, Any]] = [{} for _ in range(transport.world_size)]
        for kind, value in self.exchanger.items():
            if isinstance(value, Mapping):
                # a tensor at a time, so that only rank 0 needs memory for those of all ranks
                for rank in ranks:
                    rank[kind] = {}
                for name, tensor in value.items():
                    everyones = transport.all_gather_object(tensor, key="exchange state")
                    if transport.rank == 0:
                        for rank, theirs in zip(ranks, everyones, strict=True):
                            rank[kind][name] = theirs
            else:
                for rank in ranks:
                    rank[kind] = value
        if transport.rank != 0:
            return None
        return {
            "exchanger": ranks,
            "plan": None if self.plan is None else self.plan.to_json(),
            "rowwise": self.rowwise,
            "made_for": dict(self.made_for),
        }
