"""Both halves of all-reduces over torch.distributed.

[Note: direct messages] On CPUs each rank sends its rows straight to the others. gloo's own
all-to-all and all-gather copy rows that need not move, and hold a thread each until all ranks have
come, of which a process group has two: where one rank is ahead, what both could send waits behind
what one of them cannot. Messages that were asked for pass those that were not.

[Note: asking] gloo sends what the receiver has asked for, and the asking is a message of its own
on the same connection, behind whatever is being sent there. So each direction has a connection to
itself, whose other way carries nothing but questions: rank s sends to rank r over one process group
if s < r, and over another if s > r. The halves share them. What was asked for first is sent first:
reduce-scatters, which backward launches as soon as it can, keep their lead over the few all-gathers
that are under way at a time (`Relay`), and no two connections compete for one link.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_mgwfbp.exchange.scratch import Scratch
from lightning_mgwfbp.exchange.sum_of_rows import SumOfRows
from lightning_mgwfbp.exchange.transport import Pending

# torch 2.13 deprecates the names that older ones know
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_SCATTER_TAG, _GATHER_TAG = 1, 2  # of a tag messages are matched in order


class DirectHalves:
    """Halves by messages from rank to rank, for tensors on CPUs.

    Args:
        upwards: the group over which ranks send to higher ones.
        downwards: over which they send to lower ones.
    """

    def __init__(self, upwards: dist.ProcessGroupGloo, downwards: dist.ProcessGroupGloo) -> None:
        self._rank = upwards.rank()
        self._world_size = upwards.size()
        # torch's stubs do not know their methods
        self._upwards: Any = upwards
        self._downwards: Any = downwards
        self._scratch = Scratch()

    @classmethod
    def connected(
        cls, store: dist.Store, name: str, rank: int, world_size: int, timeout: timedelta
    ) -> DirectHalves:
        """Make both groups. Collective.

        Args:
            store: where the ranks meet.
            name: the same on all ranks, and never used before.
            rank, world_size: this rank among those that take part.
            timeout: how long a message may take before it counts as failed.
        """
        upwards, downwards = (
            dist.ProcessGroupGloo(
                dist.PrefixStore(f"{name} {way}", store), rank, world_size, timeout
            )
            for way in ("up", "down")
        )
        return cls(upwards, downwards)

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        own = self._rank
        received = self._scratch.take(rows[1:])
        sources = [*received[:own], rows[own], *received[own:]]
        return SumOfRows(
            self._exchange(sources, list(rows), _SCATTER_TAG),
            sources,
            own,
            received,
            self._scratch,
        )

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        sent = [rows[self._rank]] * self._world_size
        return self._exchange(list(rows), sent, _GATHER_TAG)

    def close(self) -> None:
        del self._upwards, self._downwards  # their connections end with them

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], tag: int) -> _Messages:
        """Receive and send one row from and to each other rank, the next ones first."""
        messages = []
        for distance in range(1, self._world_size):
            source = (self._rank - distance) % self._world_size
            group = self._upwards if source < self._rank else self._downwards
            messages.append(group.recv([received[source]], source, tag))
        for distance in range(1, self._world_size):
            target = (self._rank + distance) % self._world_size
            group = self._upwards if self._rank < target else self._downwards
            messages.append(group.send([sent[target]], target, tag))
        return _Messages(messages)


class _Messages:
    """Sends and receives under way. Each is waited for once: gloo counts completions, so that a
    second wait would not return."""

    def __init__(self, messages: Sequence[dist.Work]) -> None:
        self._messages = deque(messages)

    def wait(self) -> None:
        while self._messages:
            message = self._messages.popleft()
            try:
                message.wait()
            except Exception:  # not an interrupt, which is raised when gloo's wait has returned
                self._messages.appendleft(message)
                raise


class CollectiveHalves:
    """Halves by the backend's own collectives, for tensors on accelerators.

    Args:
        scatter: the group for reduce-scatters.
        gather: the group for all-gathers; destroyed by `close`.
    """

    def __init__(self, scatter: dist.ProcessGroup, gather: dist.ProcessGroup) -> None:
        self._scatter = scatter
        self._gather = gather
        self._rank = scatter.rank()

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        own = rows[self._rank]
        return _reduce_scatter_single(own, rows.view(-1), group=self._scatter, async_op=True)

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        own = rows[self._rank]
        return all_gather_single(rows.view(-1), own, group=self._gather, async_op=True)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group(self._gather)
        # connections end with the last reference, and a cycle may keep this object for long
        del self._scatter, self._gather
