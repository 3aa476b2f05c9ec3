"""Transport over torch.distributed: the only file that calls its collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_mgwfbp.exchange.scratch import Scratch
from lightning_mgwfbp.exchange.sum_of_rows import SumOfRows
from lightning_mgwfbp.exchange.transport import Pending

T = TypeVar("T")

# torch 2.13 deprecates the names that older ones know
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class TorchTransport:
    """Gloo, NCCL or MPI, over the ranks of `process_group` (default: all ranks, on a group of
    the transport's own).

    A group of its own keeps gradients, which are launched from inside backward, out of the way of
    collectives that others issue there (SyncBatchNorm) or between steps (loggers, metrics).

    Args:
        process_group: an existing group to use instead; it is then not destroyed by `close`.
        timeout: how long a collective may take before it counts as failed; only for an own group.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "TorchTransport needs torch.distributed: call torch.distributed.init_process_group"
                " first (Lightning's strategies do)."
            )
        self._owned = process_group is None
        self._scratch = Scratch()
        self._timeout = timeout
        self._group = dist.new_group(timeout=timeout) if process_group is None else process_group
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    @classmethod
    def world(cls) -> TorchTransport:
        """The transport over the default process group itself."""
        return cls(dist.group.WORLD)

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        return dist.all_reduce(buffer, group=self._group, async_op=True)

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        if self._is_pair(buffer):
            own = output[self.rank]
            if own.data_ptr() != buffer.data_ptr():
                own.copy_(buffer)
            return self._swap(output[1 - self.rank], buffer)
        return _all_gather_single(output.view(-1), buffer, group=self._group, async_op=True)

    def reduce_scatter(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        if self._is_pair(buffer):
            received = self._scratch.take(output)
            work = self._swap(received, buffer[1 - self.rank])
            return SumOfRows(work, output, (buffer[self.rank], received), received, self._scratch)
        if buffer.device.type == "cpu":
            received = self._scratch.take(buffer)
            work = dist.all_to_all_single(
                received.view(-1), buffer.view(-1), group=self._group, async_op=True
            )
            return SumOfRows(work, output, received.unbind(), received, self._scratch)
        return _reduce_scatter_single(output, buffer.view(-1), group=self._group, async_op=True)

    def _is_pair(self, buffer: Tensor) -> bool:
        """Whether rows can be swapped in place: gloo's collectives copy this rank's own, and an
        all-gather all others. On two ranks that is half of the CPU time of both halves."""
        return self.world_size == 2 and buffer.device.type == "cpu"

    def _swap(self, received: Tensor, sent: Tensor) -> Pending:
        splits = [sent.numel()] * 2
        splits[self.rank] = 0
        return dist.all_to_all_single(
            received, sent, splits, splits, group=self._group, async_op=True
        )

    def broadcast(self, buffer: Tensor, root: int, *, key: str) -> Pending:
        return dist.broadcast(buffer, self._global(root), group=self._group, async_op=True)

    def all_gather_object(self, value: T, *, key: str) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_object(self, value: T, root: int, *, key: str) -> list[T] | None:
        values: list[Any] | None = [None] * self.world_size if self.rank == root else None
        dist.gather_object(value, values, self._global(root), group=self._group)
        return values

    def broadcast_object(self, value: T, root: int, *, key: str) -> T:
        values = [value]
        dist.broadcast_object_list(values, self._global(root), group=self._group)
        return values[0]

    def barrier(self, *, key: str) -> None:
        dist.barrier(group=self._group)

    def sibling(self) -> TorchTransport:
        ranks = dist.get_process_group_ranks(self._group)
        # Synchronised locally, a group gets its name from its ranks, and in torch 2.13 a second one
        # of that name meets at the addresses of the first. So only where others do not come here.
        is_part = len(ranks) < dist.get_world_size()
        group = dist.new_group(ranks, timeout=self._timeout, use_local_synchronization=is_part)
        sibling = TorchTransport(group)
        sibling._owned, sibling._timeout = True, self._timeout
        return sibling

    def _global(self, root: int) -> int:
        # the argument that takes a rank of the group itself is younger than torch 2.4
        return dist.get_global_rank(self._group, root)

    def close(self) -> None:
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self._group)
        # connections end with the last reference, and a cycle may keep this object for long
        del self._group
