"""Transport over torch.distributed: only this file and `torch_halves` call its collectives."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store

from lightning_mgwfbp.exchange.torch_halves import (
    CollectiveHalves,
    DirectHalves,
    all_gather_single,
)
from lightning_mgwfbp.exchange.transport import Pending

T = TypeVar("T")


class TorchTransport:
    """Gloo, NCCL or MPI, over the ranks of `process_group` (default: all ranks, on a group of
    the transport's own).

    A group of its own keeps gradients, which are launched from inside backward, out of the way of
    collectives that others issue there (SyncBatchNorm) or between steps (loggers, metrics).

    Args:
        process_group: an existing group to use instead; it is then not destroyed by `close`.
        timeout: how long a collective may take before it counts as failed, in own groups; where
            left out, as long as in the group given, or as torch's own default says.

    Attributes:
        timeout: that of own groups.

    Raises:
        RuntimeError: torch.distributed is not initialised.
    """

    _count: ClassVar[Iterator[int]] = itertools.count()  # of halves

    def __init__(
        self, process_group: dist.ProcessGroup | None = None, timeout: timedelta | None = None
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "TorchTransport needs torch.distributed: call torch.distributed.init_process_group"
                " first (Lightning's strategies do)."
            )
        self._owned = process_group is None
        self._group = dist.new_group(timeout=timeout) if process_group is None else process_group
        self.timeout = timeout or _timeout_of(self._group)
        self.rank = dist.get_rank(self._group)
        self.world_size = dist.get_world_size(self._group)

    @classmethod
    def world(cls) -> TorchTransport:
        """The transport over the default process group itself."""
        return cls(dist.group.WORLD)

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        return dist.all_reduce(buffer, group=self._group, async_op=True)

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        return all_gather_single(output.view(-1), buffer, group=self._group, async_op=True)

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

    def halves(self, device: torch.device) -> DirectHalves | CollectiveHalves:
        ranks = dist.get_process_group_ranks(self._group)
        store = _get_default_store()  # MPI has none
        if device.type == "cpu" and store is not None:
            # rank 0's count: others may have made more before, with ranks that are not here
            number = self.broadcast_object(next(self._count), 0, key="halves")
            name = f"lightning_mgwfbp halves {ranks} {number}"
            return DirectHalves.connected(store, name, self.rank, self.world_size, self.timeout)
        # Synchronised locally, a group gets its name from its ranks, and in torch 2.13 a second one
        # of that name meets at the addresses of the first. So only where others do not come here.
        is_part = len(ranks) < dist.get_world_size()
        second = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=is_part)
        return CollectiveHalves(self._group, second)

    def _global(self, root: int) -> int:
        # the argument that takes a rank of the group itself is younger than torch 2.4
        return dist.get_global_rank(self._group, root)

    def close(self) -> None:
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self._group)
        # connections end with the last reference, and a cycle may keep this object for long
        del self._group


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    backend: Any = group._get_backend(group._device_types[0])
    # MPI has no timeouts
    return backend.options._timeout if hasattr(backend, "options") else default_pg_timeout
