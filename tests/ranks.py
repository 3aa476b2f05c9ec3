"""Real gloo processes for tests: a pool that stays alive, so that torch is imported once.

`run_ranks(fn, *args, world_size=2)` runs `fn(rank, *args)` in each process, torch.distributed
initialised; `train_ranks` runs it as a scheduler would start it, for a Trainer to initialise.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_LIMIT_SECONDS = 180.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Return what `fn(rank, *args)` returned on each rank, in a gloo process group."""
    return _pool(world_size).run(fn, args, initialise=True)


def train_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """The same without a process group: `LOCAL_RANK` and its like are set for a Trainer."""
    return _pool(world_size).run(fn, args, initialise=False)


class _Pool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        context = multiprocessing.get_context("spawn")
        self.workers = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], initialise: bool) -> list[Any]:
        port = free_port()
        for _, pipe in self.workers:
            pipe.send((fn, args, initialise, port, list(warnings.filters)))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(self.workers):
            try:
                if not pipe.poll(_LIMIT_SECONDS):
                    raise TimeoutError(f"rank {rank} gave no result in {_LIMIT_SECONDS:.0f} s")
                ok, value = pipe.recv()
            except (EOFError, TimeoutError) as error:
                ok, value = False, f"rank {rank}: {error!r}"
            (results if ok else errors).append(value)
        if errors:
            # whatever state the failure left behind is not for the next test
            self.close()
            _POOLS.pop(self.world_size)
            raise RuntimeError("\n".join(errors))
        return results

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()


_POOLS: dict[int, _Pool] = {}


def discard_pools() -> None:
    """Have the next ranks be new processes, in which nothing has run before."""
    while _POOLS:
        _POOLS.popitem()[1].close()


def _pool(world_size: int) -> _Pool:
    if world_size not in _POOLS:
        _POOLS[world_size] = _Pool(world_size)
    return _POOLS[world_size]


@atexit.register
def _close_pools() -> None:
    for pool in _POOLS.values():
        pool.close()


def _serve(rank: int, world_size: int, pipe: Connection) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    while True:
        try:
            fn, args, initialise, port, filters = pipe.recv()
        except EOFError:
            return
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            LOCAL_RANK=str(rank),
            NODE_RANK="0",
            WORLD_SIZE=str(world_size),
        )
        try:
            with warnings.catch_warnings():
                warnings.filters[:] = filters  # type: ignore[index]
                if initialise:
                    dist.init_process_group("gloo", rank=rank, world_size=world_size)
                answer = True, fn(rank, *args)
        except BaseException:
            answer = False, f"--- rank {rank}\n{traceback.format_exc()}"
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(answer)
