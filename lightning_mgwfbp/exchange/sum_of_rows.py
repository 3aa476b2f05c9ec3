"""`SumOfRows`: the second part of a reduce-scatter that is an exchange of rows and a sum.

The libraries' own reduce-scatters are worse on CPUs: gloo's in torch moves as many bytes as an
all-reduce, and Horovod's now and then leaves the third of three ranks out of a half of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.scratch import Scratch
from lightning_mgwfbp.exchange.transport import Pending


class SumOfRows:
    """Once all rows have come, replaces this rank's by the sum of all, in the order of ranks.

    Args:
        work: brings the others.
        rows: of all ranks, each (numel,); the first may be overwritten.
        rank: this one's.
        received: the memory in which they came, which is to be given back.
        scratch: to whom.
    """

    def __init__(
        self, work: Pending, rows: Sequence[Tensor], rank: int, received: Tensor, scratch: Scratch
    ) -> None:
        self._work = work
        self._rows = rows
        self._rank = rank
        self._received: Tensor | None = received
        self._scratch = scratch

    def wait(self) -> None:
        self._work.wait()
        received, self._received = self._received, None
        if received is None:  # waited for before
            return
        rows, self._rows = self._rows, ()
        total = rows[0]
        for other, row in enumerate(rows[1:], start=1):
            # into the own row from its turn on, and no sooner: it is to be added yet
            total = torch.add(total, row, out=rows[self._rank if other >= self._rank else 0])
        self._scratch.give_back(received)
