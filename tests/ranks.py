"""Real gloo processes for tests: one pool that stays alive, so that each imports torch once.

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
from multiprocessing.context import SpawnProcess
from typing import Any

_LIMIT_SECONDS = 180.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Return what `fn(rank, *args)` returned on each rank, in a gloo process group."""
    return _POOL.run(fn, args, world_size, initialise=True)


def train_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """The same without a process group: `LOCAL_RANK` and its like are set for a Trainer."""
    return _POOL.run(fn, args, world_size, initialise=False)


class _Pool:
    """As many processes as the largest `world_size` so far; the first of them are the ranks."""

    def __init__(self) -> None:
        self.workers: list[tuple[SpawnProcess, Connection]] = []

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], world_size: int, initialise: bool
    ) -> list[Any]:
        self.grow(world_size)
        ranks = self.workers[:world_size]
        port = free_port()
        for _, pipe in ranks:
            pipe.send((fn, args, world_size, initialise, port, list(warnings.filters)))
        results, errors = [], []
        for rank, (_, pipe) in enumerate(ranks):
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
            raise RuntimeError("\n".join(errors))
        return results

    def grow(self, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in range(len(self.workers), world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def close(self) -> None:
        while self.workers:
            process, pipe = self.workers.pop()
            pipe.close()
            process.kill()
            process.join()


_POOL = _Pool()
atexit.register(_POOL.close)


def discard_pool() -> None:
    """Have the next ranks be new processes, in which nothing has run before."""
    _POOL.close()


def _serve(rank: int, pipe: Connection) -> None:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    torch.set_num_threads(1)
    while True:
        try:
            fn, args, world_size, initialise, port, filters = pipe.recv()
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
