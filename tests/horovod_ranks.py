"""Real Horovod processes for tests: the gloo pool of `ranks`, starting Horovod for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ranks import run_ranks

from lightning_mgwfbp.exchange.horovod_rendezvous import start_horovod, stop_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.torch_transport import TorchTransport


class AloneTransport(HorovodTransport):
    """As where torch.distributed does not run beside Horovod."""

    def _runs_beside_torch(self) -> bool:
        return False


def on_horovod_ranks(
    fn: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    made: Callable[[], HorovodTransport] = HorovodTransport,
) -> list[Any]:
    """Return what `fn(made(), *args)` returned on each rank."""
    return run_ranks(_over_horovod, made, fn, args, world_size=world_size)


def _over_horovod(
    _: int, made: Callable[[], HorovodTransport], fn: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    assert start_horovod(TorchTransport.world())
    try:
        return fn(made(), *args)
    finally:
        stop_horovod()
