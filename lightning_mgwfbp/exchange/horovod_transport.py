"""Transport over Horovod: the only file that calls its collectives."""

from __future__ import annotations

import itertools
import pickle
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgwfbp.exchange.horovod_halves import HorovodHalves
from lightning_mgwfbp.exchange.horovod_rendezvous import (
    init_launched,
    is_launched,
    load_horovod,
    start_horovod,
    stop_horovod,
)
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Halves, Pending, Transport, in_background

T = TypeVar("T")

# What Horovod cannot sum, and a dtype that holds the sums.
_SUMMED_AS = {
    torch.bfloat16: torch.float32,
    torch.uint8: torch.int32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
}
# Horovod's own wait polls without a pause, and takes the core from whoever serves the network: the
# eight messages of [Note: cycles] take 26 to 68 ms in the place of 18 to 24.
_POLL_SECONDS = 5e-5
# Of a thread in the background, which keeps nobody waiting: 0.9 % of a core in the place of 10 %.
_BACKGROUND_POLL_SECONDS = 2e-3
# What to do, by words of Horovod's errors.
_ADVICE = {
    "Mismatched": "The ranks exchange different things under one name: they must run the same"
    " model and options.",
    "same name": "It is still in flight from an earlier call, which must be waited for first.",
    "not supported": "For tensors on GPUs, build Horovod with"
    " `HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh`.",
}
_ADVICE_ELSE = (
    "A rank has ended or lost its connection, and Horovod cannot go on without it: start all of"
    " them anew."
)


class HorovodTransport:
    """Horovod, over all of its ranks; started here under horovodrun or mpirun, in the place of
    `hvd.init()`.

    Horovod matches calls by name; names are made of the kind of collective, `key`, and a number
    of the transport. Copies travel as bytes, whatever their dtype.

    [Note: cycles] Horovod looks for new messages once per cycle, and each cycle is a message
    among all ranks even where there is nothing to do. Two emulated hosts on two cores (shared with
    other work: ranges of two runs), 1 Gbit/s, fusion off, milliseconds:

        cycle                    0.1     0.5       1     2       5   torch's gloo
        one message of 8 bytes   0.8     0.7     1.2   2.2     5.2   0.3
        eight of 256 KiB       26-38   25-29   18-24    23   25-28   17-19
        idle, % of a core      36-42   13-20    8-10     6       3   0

    So it stays at Horovod's default, 1 ms; set HOROVOD_CYCLE_TIME for another. Fusion is off
    (`start_horovod`): the planner decides what travels as one message, and when. With it those
    eight travel as one, in 19 ms.

    Args:
        timeout: how long a collective may take before it counts as failed.

    Raises:
        ModuleNotFoundError: Horovod cannot be imported.
        RuntimeError: Horovod has not been started, and no launcher of its own has told the ranks.
    """

    _count: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, timeout: timedelta = timedelta(minutes=30)) -> None:
        self._hvd = init_launched() if is_launched() else load_horovod()
        if not self._hvd.is_initialized():
            raise RuntimeError(
                "HorovodTransport needs ranks: launch with `horovodrun -np 2 python train.py`."
                ' (Within Lightning `strategy="mgwfbp_horovod"` needs no launcher.)'
            )
        self._timeout_seconds = timeout.total_seconds()
        self.rank: int = self._hvd.rank()
        self.world_size: int = self._hvd.size()
        self._stops_horovod = False
        self._number = -1
        # rank 0's count: other processes may have made more transports before, or fewer
        self._number = self.broadcast_object(next(self._count), 0, key="transport")

    @classmethod
    def over(cls, control: Transport, timeout: timedelta) -> HorovodTransport:
        """Start Horovod with the ranks of `control`, unless it runs already; `close` then stops it.

        Raises:
            ModuleNotFoundError: Horovod cannot be imported.
            RuntimeError: a host's name leads nowhere, or Horovod runs with other ranks.
        """
        starts = start_horovod(control, timeout)
        transport = cls(timeout)
        transport._stops_horovod = starts
        return transport

    def all_reduce(self, buffer: Tensor, *, key: str) -> Pending:
        hvd = self._hvd
        return self._start(hvd.allreduce_async_, _summable(buffer), buffer, key, op=hvd.Sum)

    def all_to_all(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        """Start to fill row r of `output`, (world_size, numel), with this rank's row of rank r's
        `buffer`."""
        return self._start(self._hvd.alltoall_async, _bytes_of(buffer), _bytes_of(output), key)

    def all_gather(self, output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        return self._start(self._hvd.allgather_async, _bytes_of(buffer), _bytes_of(output), key)

    def broadcast(self, buffer: Tensor, root: int, *, key: str) -> Pending:
        data = _bytes_of(buffer)
        return self._start(self._hvd.broadcast_async_, data, data, key, root_rank=root)

    def all_gather_object(self, value: T, *, key: str) -> list[T]:
        data = _pickled(value)
        sizes = torch.empty((self.world_size, 1), dtype=torch.int64)
        self.all_gather(sizes, torch.tensor([data.numel()]), key=f"{key} sizes").wait()
        received = torch.empty(int(sizes.sum()), dtype=torch.uint8)
        self._start(self._hvd.allgather_async, data, received, key).wait()
        return [_unpickled(part) for part in received.split(sizes.flatten().tolist())]

    def gather_object(self, value: T, root: int, *, key: str) -> list[T] | None:
        values = self.all_gather_object(value, key=key)  # Horovod has no gather
        return values if self.rank == root else None

    def broadcast_object(self, value: T, root: int, *, key: str) -> T:
        data = _pickled(value)
        size = torch.tensor([data.numel()])
        self.broadcast(size, root, key=f"{key} size").wait()
        if self.rank != root:
            data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(data, root, key=key).wait()
        result: T = _unpickled(data)
        return result

    def barrier(self, *, key: str) -> None:
        self.all_reduce(torch.zeros(1), key=f"{key} barrier").wait()

    def halves(self, device: torch.device) -> Halves:
        if device.type == "cpu" and self._runs_beside_torch():  # faster: [Note: rates]
            timeout = timedelta(seconds=self._timeout_seconds)
            return TorchTransport(dist.group.WORLD, timeout).halves(device)
        return HorovodHalves(self)

    def _runs_beside_torch(self) -> bool:
        """Whether torch.distributed joins the same ranks. Collective."""
        mine = self.rank, self.world_size
        here = dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) == mine
        return all(self.all_gather_object(here, key="halves"))

    def close(self) -> None:
        if self._stops_horovod:
            stop_horovod()

    def _start(
        self, collective: Callable[..., int], sent: Tensor, target: Tensor, key: str, **options: Any
    ) -> _Collective:
        name = f"lightning_mgwfbp.{self._number}.{collective.__name__}.{key}"
        with _explained(name):
            handle = collective(sent, name=name, **options)
        return _Collective(self._hvd, handle, target, name, self._timeout_seconds)


class _Collective:
    """One that has been started, and whose result belongs into `target`."""

    def __init__(
        self, hvd: Any, handle: int, target: Tensor, name: str, timeout_seconds: float
    ) -> None:
        self._hvd = hvd
        self._handle = handle
        self._target = target
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._deadline = time.monotonic() + timeout_seconds
        self._done = False

    def wait(self) -> None:
        if self._done:
            return
        pause = _BACKGROUND_POLL_SECONDS if in_background.get() else _POLL_SECONDS
        while not self._hvd.poll(self._handle):
            if time.monotonic() > self._deadline:
                raise RuntimeError(
                    f"Horovod's {self._name!r} has not ended within {self._timeout_seconds:g} s:"
                    " some rank never started it, being elsewhere in the program, or stopped. Read"
                    " the other ranks' output, or give a longer `timeout`."
                )
            time.sleep(pause)
        with _explained(self._name):
            result = self._hvd.synchronize(self._handle)
        if isinstance(result, tuple):  # an all-to-all's has sizes, too
            result = result[0]
        if result is not self._target:
            self._target.copy_(result.view(self._target.shape))
        self._done = True


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Raise what to do in the place of Horovod's own error."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        advice = next((a for words, a in _ADVICE.items() if words in str(error)), _ADVICE_ELSE)
        raise RuntimeError(f"Horovod's {name!r} failed: {error} {advice}") from error


def _summable(buffer: Tensor) -> Tensor:
    dtype = _SUMMED_AS.get(buffer.dtype)
    if dtype is None:
        return buffer
    if buffer.dtype == torch.bfloat16:
        _warn_of_bfloat16()
    return buffer.to(dtype)


@cache  # once per process
def _warn_of_bfloat16() -> None:
    warnings.warn(
        "Horovod cannot sum bfloat16: it travels as float32, in twice the bytes."
        ' `compressor="fp16"` travels as it is, and `transport="torch"` sums bfloat16.',
        stacklevel=2,
    )


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory, (nbytes,)."""
    return tensor.view(-1).view(torch.uint8)


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
