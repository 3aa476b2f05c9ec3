"""`DDPCommHook`: DistributedDataParallel's communication hooks, run on merge groups.

[Note: one at a time] Where a future is completed by another thread (gloo), a hook's later messages
(PowerSGD's second, a quantizer's second) are launched from there, at no fixed place among the next
bucket's, and may hold all of gloo's threads waiting for each other. So there a hook is called when
that of the bucket before is done. On GPUs callbacks run, in order, in the launching thread.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchange, Exchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Pending, Transport


@dataclass(frozen=True, repr=False)
class DDPCommHook:
    """Exchange gradients by `hook(state, bucket)`, as `register_comm_hook(state, hook)` would.

    The hook averages by itself, over the process group that it is told by `state`. What it keeps
    in `state` is in no checkpoint; what it keeps by `bucket.index()` must begin after the last
    change of plan, thus `PowerSGDState(start_powerSGD_iter=...)` after the warm-up.

    Args:
        hook: a Python function that returns a future of the averages; not one that needs the DDP
            module itself (ZeroRedundancyOptimizer's, DDP's mixed precision). Of torch's own the
            quantizing ones need NCCL, here as there.
        state: given to it with every bucket.
    """

    hook: Callable[[Any, Any], Any]
    state: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.hook, dist.BuiltinCommHookType) or not callable(self.hook):
            raise ValueError(
                "`DDPCommHook(hook=...)` must be a Python function of state and bucket, got"
                f" {self.hook!r}. torch.distributed.algorithms.ddp_comm_hooks.default_hooks has"
                " them for the built-in ones: allreduce_hook, fp16_compress_hook."
            )

    def __repr__(self) -> str:
        # ranks compare it: a function's own has its address
        state = None if self.state is None else type(self.state).__qualname__
        return f"DDPCommHook(hook={_name(self.hook)}, state={state})"


class HookBucket:
    """What a hook sees of a bucket: the methods of `torch.distributed.GradBucket`.

    Complex gradients are pairs of reals, in a last dimension of 2.
    """

    def __init__(self, bucket: Bucket, index: int, is_last: bool) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.data

    def index(self) -> int:
        """Place in the order of launch, from 0 on; changes with the plan."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last one of a step."""
        return self._is_last

    def buffer(self) -> Tensor:
        """All gradients, (numel,)."""
        return self._buffer

    def set_buffer(self, tensor: Tensor) -> None:
        """Have `buffer` return `tensor`, (numel,), of any dtype."""
        self._buffer = tensor

    def parameters(self) -> list[Tensor]:
        """Whose gradients these are."""
        return list(self._bucket.parameters[: self._bucket.compressed])

    def gradients(self) -> list[Tensor]:
        """Slices of `buffer` in the parameters' shapes.

        As in DDP their elements are in the order of memory, so that hooks may `view` them: for a
        parameter in channels_last not the order of its own.
        """
        pairs = zip(self._bucket.shapes, self.parameters(), strict=False)  # some are not compressed
        shapes = [(*shape, 2) if p.is_complex() else shape for shape, p in pairs]
        chunks = self._bucket.chunks(self._buffer)[: len(shapes)]
        return [chunk.view(shape) for chunk, shape in zip(chunks, shapes, strict=True)]


class CommHookExchanger(Exchanger):
    """Leaves the averaging to a hook; only the tails of buckets are exchanged here.

    Args:
        transport: over torch.distributed, as the hook's own collectives are.
        method: what the user chose.

    Raises:
        ValueError: another transport.
    """

    keeps_residuals = True  # a hook may have error feedback; one without loses nothing by it

    def __init__(self, transport: Transport, method: DDPCommHook) -> None:
        super().__init__(transport)
        if not isinstance(transport, TorchTransport):
            raise ValueError(
                "`compressor=DDPCommHook(...)` calls torch.distributed's collectives: it needs"
                f" `transport='torch'`, got {type(transport).__name__}."
            )
        self._method = method
        self._timeout = transport.timeout
        self._buckets: list[Bucket] = []
        self._running: torch._C.Future | None = None

    def compresses(self, parameter: Tensor) -> bool:
        return True

    def adopt(
        self,
        buckets: Sequence[Bucket],
        pieces: Sequence[int] = (),
        gather_order: Sequence[int] = (),
    ) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.body_numel]

    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> Exchange:
        if not bucket.body_numel:
            return DenseExchanger(self.transport).start(bucket, key=key)
        if self._running is not None and bucket.buffer.device.type == "cpu":
            _await(self._running, self._timeout, _name(self._method.hook))  # [Note: one at a time]
        # not in the bucket's own memory, into which a hook may grow its buffer (resize_)
        tail = bucket.tail * (1.0 / self.transport.world_size)
        pending = self.transport.all_reduce(tail, key=f"{key} tail")
        index = self._buckets.index(bucket)
        seen = HookBucket(bucket, index, is_last=index == len(self._buckets) - 1)
        future = self._method.hook(self._method.state, seen)
        name = _name(self._method.hook)
        if not isinstance(future, torch._C.Future):  # the kind that `Work.get_future` gives, too
            raise TypeError(
                f"`DDPCommHook(hook={name})` must return a torch.futures.Future, got"
                f" {type(future).__name__}: put the averages in one with `set_result`."
            )
        self._running = future
        return _HookExchange(bucket, future, tail, pending, name, self._timeout)

    def conclude(self, others: Iterable[Tensor] = ()) -> None:
        self._running = None  # it may hold the bucket's memory


class _HookExchange:
    def __init__(
        self,
        bucket: Bucket,
        future: torch._C.Future,
        tail: Tensor,
        pending: Pending,
        name: str,
        timeout: timedelta,
    ) -> None:
        self._bucket = bucket
        self._future = future
        self._tail = tail
        self._pending = pending
        self._name = name
        self._timeout = timeout

    def finish(self) -> None:
        self._pending.wait()
        averages = _await(self._future, self._timeout, self._name)
        if isinstance(averages, list) and len(averages) == 1:
            averages = averages[0]
        data = self._bucket.data
        is_tensor = isinstance(averages, Tensor) and averages.is_floating_point()
        if not is_tensor or averages.numel() != data.numel():
            got = tuple(averages.shape) if is_tensor else averages
            raise TypeError(
                f"The future of `DDPCommHook(hook={self._name})` must hold one real tensor of"
                f" the bucket's {data.numel()} numbers, got {got!r}."
            )
        if averages.data_ptr() != data.data_ptr():
            data.copy_(averages.view(-1))
        self._bucket.tail.copy_(self._tail)


def _await(future: torch._C.Future, timeout: timedelta, name: str) -> Any:
    """What `future.wait()` returns, which by itself waits for ever.

    Raises:
        RuntimeError: the timeout has passed.
    """
    if not future.done():
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout.total_seconds()):
            raise RuntimeError(
                f"the future of `DDPCommHook(hook={name})` has not been completed within"
                f" {timeout.total_seconds():g} s"
            )
    return future.wait()


def _name(hook: Callable[..., Any]) -> str:
    """Where to find a function, or of what kind a callable object is; the same on all ranks."""
    if isinstance(hook, partial):
        return _name(hook.func)
    named = hook if inspect.isroutine(hook) else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
