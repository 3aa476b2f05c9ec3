"""Real Horovod processes for tests: the gloo pool of `ranks`, starting Horovod for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks import run_ranks

from lightning_mgwfbp.exchange.horovod_rendezvous import start_horovod, stop_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.torch_transport import TorchTransport


def on_horovod_ranks(fn: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Return what `fn(transport, *args)` returned on each rank."""
    return run_ranks(_over_horovod, fn, args, world_size=world_size)


def _over_horovod(_: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    assert start_horovod(TorchTransport.world())
    try:
        return fn(HorovodTransport(), *args)
    finally:
        stop_horovod()
