"""What moves bytes between ranks: the `Transport` protocol, and a loopback of threads for tests.

A transport sums and copies, nothing else: it knows neither gradients nor merge groups nor means.
Every call names what it carries by a `key`: torch.distributed matches calls by their order, Horovod
by their name, and with both kept right a program is right on either. Of one kind of collective only
one may be in flight under the same key.

Ranks send equally much. Where they have unequally much, they must tell each other first, to know
how much to receive, and may then as well pad (`exchange/rows.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

in_background: ContextVar[bool] = ContextVar("in_background", default=False)
"""Whether the present thread does nothing but wait, so that a moment more is less than its CPU."""


class Pending(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Return once the result is in the buffer the collective was started with.

        May be called again, but by one thread at a time.
        """


class Transport(Protocol):
    """The collectives that the package needs, each called by all ranks in the same order."""

    @property
    def rank(self) -> int:
        """This process, in [0, world_size)."""

    @property
    def world_size(self) -> int:
        """How many processes take part."""

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        """Start to replace `buffer`, of any shape, by its sum over all ranks."""

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        """Start to fill `output`, (world_size, numel), with every rank's `buffer`, (numel,), which
        may be this rank's row of `output`."""

    def broadcast(self, buffer: Tensor, root: int, *, key: str) -> Pending:
        """Start to replace `buffer`, of any shape, by rank `root`'s."""

    def all_gather_object(self, value: T, *, key: str) -> list[T]:
        """Return every rank's `value`, in the order of ranks. Picklable; for small values."""

    def gather_object(self, value: T, root: int, *, key: str) -> list[T] | None:
        """Return every rank's `value` on rank `root`, None elsewhere. Picklable, of any size."""

    def broadcast_object(self, value: T, root: int, *, key: str) -> T:
        """Return rank `root`'s `value`. Picklable; for small values."""

    def barrier(self, *, key: str) -> None:
        """Return once every rank has called it."""

    def halves(self, device: torch.device) -> Halves:
        """Return what exchanges tensors on `device` in two halves, over the same ranks.

        Collective. To be closed for itself, and before the transport.
        """

    def close(self) -> None:
        """Give back what the transport opened."""


class Halves(Protocol):
    """The two halves of all-reduces, each called by all ranks in the same order.

    The order of one half says nothing of the other's, and each may be called by a thread of its
    own. Both work in place, on contiguous `rows`, (world_size, numel), of which rank r owns row r.
    Waiting raises RuntimeError if another rank is gone, or does not come in time.
    """

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        """Start to replace this rank's row by its sum over all ranks; the others keep what they
        hold."""

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        """Start to replace all other rows by what their owners have there."""

    def close(self) -> None:
        """Give back what was opened for them."""


class Half(Protocol):
    """Either method of `Halves`."""

    def __call__(self, rows: Tensor, *, key: str) -> Pending: ...


class _Done:
    def wait(self) -> None:
        return


class _Hub:
    """Where the threads of a loopback meet: the n-th call of each rank is one collective."""

    def __init__(self, world_size: int, timeout_seconds: float) -> None:
        self.world_size = world_size
        self.timeout_seconds = timeout_seconds
        self.barrier = threading.Barrier(world_size, timeout=timeout_seconds)
        self.slots: list[tuple[str, Any]] = [("", None)] * world_size

    def meet(self, rank: int, key: str, value: T, combine: Callable[[list[T]], Any]) -> Any:
        self.slots[rank] = (key, value)
        self.barrier.wait()
        keys = {k for k, _ in self.slots}
        combined = combine([v for _, v in self.slots])
        self.barrier.wait()  # nobody overwrites its slot before all have read
        assert len(keys) == 1, f"ranks met in different collectives: {sorted(keys)}"
        return combined


class LoopbackTransport:
    """All ranks in one process, one thread each; a collective is done when its call returns.

    Stricter than a network: ranks that meet with different keys fail at once.

    Example:
        >>> LoopbackTransport.solo().world_size
        1
    """

    def __init__(self, hub: _Hub, rank: int) -> None:
        self._hub = hub
        self.rank = rank
        self.world_size = hub.world_size

    @classmethod
    def ring(cls, world_size: int, timeout_seconds: float = 30.0) -> list[LoopbackTransport]:
        """Make one transport for each of `world_size` threads."""
        hub = _Hub(world_size, timeout_seconds)
        return [cls(hub, rank) for rank in range(world_size)]

    @classmethod
    def solo(cls) -> LoopbackTransport:
        """Make the transport of a process that is alone."""
        return cls.ring(1)[0]

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        buffer.copy_(self._hub.meet(self.rank, key, buffer, _total))
        return _Done()

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        def gather(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts)

        output.copy_(self._hub.meet(self.rank, key, buffer, gather))
        return _Done()

    def broadcast(self, buffer: Tensor, root: int, *, key: str) -> Pending:
        buffer.copy_(self._hub.meet(self.rank, key, buffer, lambda parts: parts[root].clone()))
        return _Done()

    def all_gather_object(self, value: T, *, key: str) -> list[T]:
        return list(self._hub.meet(self.rank, key, value, list))

    def gather_object(self, value: T, root: int, *, key: str) -> list[T] | None:
        values: list[T] = self._hub.meet(self.rank, key, value, list)
        return values if self.rank == root else None

    def broadcast_object(self, value: T, root: int, *, key: str) -> T:
        result: T = self._hub.meet(self.rank, key, value, lambda parts: parts[root])
        return result

    def barrier(self, *, key: str) -> None:
        self._hub.meet(self.rank, key, None, list)

    def halves(self, device: torch.device) -> LoopbackHalves:
        return LoopbackHalves(self, self._another())

    def close(self) -> None:
        return

    def _another(self) -> LoopbackTransport:
        def first(hubs: list[_Hub]) -> _Hub:
            return hubs[0]

        mine = _Hub(self.world_size, self._hub.timeout_seconds)
        return LoopbackTransport(self._hub.meet(self.rank, "halves", mine, first), self.rank)


class LoopbackHalves:
    """Both halves among threads.

    Args:
        scatter: where they meet for reduce-scatters.
        gather: where they meet for all-gathers.
    """

    def __init__(self, scatter: LoopbackTransport, gather: LoopbackTransport) -> None:
        self._scatter = scatter
        self._gather = gather

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        total = rows.clone()
        self._scatter.all_reduce(total, key=key)
        own = self._scatter.rank
        rows[own].copy_(total[own])
        return _Done()

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        return self._gather.all_gather(rows, rows[self._gather.rank], key=key)

    def close(self) -> None:
        return


def _total(parts: list[Tensor]) -> Tensor:
    result = parts[0].clone()
    for part in parts[1:]:
        result += part
    return result
