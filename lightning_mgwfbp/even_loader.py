"""`EvenLoader`: a training loader that lasts equally long on all ranks, however much each has.

At every batch each rank says how many of its own it has had so far; the answers are on their way
while the step before is computed. A rank that has run out waits for them, and goes on with its last
batch, again and again, until all have run out.

[Note: lengths] A length is believed only so far as to tell Lightning that of the longest rank.
Samplers estimate theirs, and loaders that resume within an epoch have less left than it says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Pending

_NONE_LEFT = object()


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


class EvenLoader:
    """Yields on every rank as many batches as the rank with the most has.

    Args:
        loader: this rank's; its attributes are this one's.
        counts: joins the ranks.
        limit: `Trainer(limit_train_batches=...)`, as Lightning has resolved it.
        joins: whether ranks may run out at all.
    """

    def __init__(
        self, loader: Any, counts: BatchCounts, *, limit: int | float, joins: bool
    ) -> None:
        self.loader = loader
        self._counts = counts
        self._limit = limit
        self._joins = joins
        self._begun: deque[Count] = deque()  # of batches that were fetched and not yet stepped on
        for name in ("state_dict", "load_state_dict"):  # Lightning looks for them past __getattr__
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))
        self._lengths = self._gathered_lengths()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet: while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator  # Lightning resets that of a DataLoader

    def __len__(self) -> int:
        """The longest rank's.

        Raises:
            TypeError: some rank does not know its own.
        """
        if not self._counts.is_open:
            return len(self.loader)
        known = [length for length in self._lengths if length is not None]
        if len(known) < len(self._lengths):
            raise TypeError("some rank's loader has no length")
        return max(known)

    def __iter__(self) -> Iterator[Any]:
        """Collective.

        The first batch, not this, raises a RuntimeError where some rank is known to run out: out of
        here Lightning's clean-up would hide it behind an error of its own.
        """
        if not self._counts.is_open:
            return iter(self.loader)
        for count in self._begun:
            count.numbers()
        self._begun.clear()
        self._lengths = self._gathered_lengths()
        return self._batches(iter(self.loader))

    def step_begins(self) -> Count | None:
        """The count of the batch whose step begins; None: Lightning takes no step on it."""
        return self._begun.popleft() if self._begun else None

    def _gathered_lengths(self) -> Sequence[int | None]:
        return self._counts.transport.all_gather_object(sized_len(self.loader), key="lengths")

    def _require_enough(self) -> None:
        lengths = [length for length in self._lengths if length is not None]
        if len(lengths) < len(self._lengths):
            return
        most, limit = max(lengths), self._limit
        needed = min(most, limit) if isinstance(limit, int) else int(most * limit)
        if min(lengths) < needed:
            raise unequal(map(str, lengths), min(lengths))

    def _batches(self, own: Iterator[Any]) -> Iterator[Any]:
        if not self._joins:
            self._require_enough()
        position = number = 0
        spare: Any = None
        while True:
            batch = next(own, _NONE_LEFT)
            is_own = batch is not _NONE_LEFT
            number += is_own
            count = self._counts.begin(position, number)
            if not is_own or position == 0:
                present = count.present()
                if not present:
                    return
                if position == 0 and len(present) < self._counts.transport.world_size:
                    spare = self._lent(batch, present[0])
            if is_own:
                spare = _copied(batch)
            else:
                own, batch = iter(()), _copied(spare)
            if batch is not None:  # Lightning passes over None
                self._begun.append(count)
            yield batch
            position += 1

    def _lent(self, batch: Any, root: int) -> Any:
        """A batch for those who have had none in this epoch, lest hooks miss what they look for."""
        transport = self._counts.transport
        mine = batch if transport.rank == root else None
        return transport.broadcast_object(mine, root, key="a batch to lend")


def _copied(batch: Any) -> Any:
    """The same tensors in containers of their own, which hooks may change."""
    return pytree.tree_map(lambda leaf: leaf, batch)
