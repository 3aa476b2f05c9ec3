"""`BatchCounts`: how many training batches each rank has had."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Pending


def unequal(had: Iterable[str], fewest: int) -> RuntimeError:
    """The error to be raised where ranks may not run out.

    Args:
        had: what is known of each rank's number of batches, in words.
        fewest: how many all of them have.
    """
    ranks = ", ".join(f"rank {rank} has {number}" for rank, number in enumerate(had))
    limit = f" Trainer(limit_train_batches={fewest})," if fewest else ""
    return RuntimeError(
        f"The ranks have unequally many training batches: {ranks}. Give all as many, by{limit}"
        " drop_last or a DistributedSampler; or, to go on without ranks that have run out,"
        ' MGWFBPStrategy(uneven_inputs="join").'
    )


class Count:
    """How many batches of its own each rank has had when it comes to batch `position`."""

    def __init__(self, rank: int, position: int, numbers: Tensor, pending: Pending) -> None:
        self._rank = rank
        self._position = position
        self._numbers = numbers  # (world_size, 1), once `pending` is
        self._pending: Pending | None = pending

    @property
    def is_pending(self) -> bool:
        """Whether nobody has waited for it."""
        return self._pending is not None

    def numbers(self) -> list[int]:
        """How many, by rank. Waits.

        Raises:
            RuntimeError: another rank has ended.
        """
        if self._pending is not None:
            with exchange_errors(self._rank, "how many batches each rank has"):
                self._pending.wait()
            self._pending = None
        return [int(number) for number in self._numbers]

    def present(self) -> list[int]:
        """The ranks that have this batch. Waits."""
        return [rank for rank, number in enumerate(self.numbers()) if number > self._position]

    def error(self) -> RuntimeError:
        """To be raised where not all have it."""
        numbers = self.numbers()
        had = [f"at least {n}" if n > self._position else str(n) for n in numbers]
        return unequal(had, min(numbers))


class BatchCounts:
    """Counts over a process group of their own, on the CPU: nobody waits for a device.

    Args:
        timeout: how long another rank may be behind.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self._group = dist.new_group(timeout=timeout, backend="gloo")
        self.transport = TorchTransport(self._group)
        self._begun: list[Count] = []
        self.is_open = True

    def begin(self, position: int, number: int) -> Count:
        """Tell the others that this rank, at batch `position`, has had `number`. Collective."""
        self._begun = [count for count in self._begun if count.is_pending]
        mine = torch.tensor([number])
        everyones = mine.new_empty((self.transport.world_size, 1))
        pending = self.transport.all_gather(everyones, mine, key=f"batch {position}")
        self._begun.append(Count(self.transport.rank, position, everyones, pending))
        return self._begun[-1]

    def close(self) -> None:
        """Wait for what is on its way, and let loaders be what they are without other ranks."""
        self.is_open = False
        for count in self._begun:
            with suppress(RuntimeError):  # whoever closes in mid-count has an error already
                count.numbers()
        self.transport.close()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)
        del self._group
