"""`SumOfRows`: the second part of a reduce-scatter that is an all-to-all and a sum.

On CPUs that is better than the libraries' own: gloo's in torch moves as many bytes as an
all-reduce, and Horovod's now and then leaves the third of three ranks out of a half of the sums.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.scratch import Scratch
from lightning_mgwfbp.exchange.transport import Pending


class SumOfRows:
    """Sums `rows`, each (numel,), into `output` once they have come.

    Args:
        work: brings them.
        output: (numel,); may be one of the first two.
        rows: of all ranks, in their order.
        received: the part of them that is to be given back.
        scratch: to whom.
    """

    def __init__(
        self,
        work: Pending,
        output: Tensor,
        rows: Sequence[Tensor],
        received: Tensor,
        scratch: Scratch,
    ) -> None:
        self._work = work
        self._output = output
        self._rows = rows
        self._received: Tensor | None = received
        self._scratch = scratch

    def wait(self) -> None:
        self._work.wait()
        received, self._received = self._received, None
        if received is None:  # waited for before
            return
        rows, self._rows = self._rows, ()
        if len(rows) == 1:
            self._output.copy_(rows[0])
        else:
            torch.add(rows[0], rows[1], out=self._output)
        for row in rows[2:]:
            self._output.add_(row)
        self._scratch.give_back(received)
