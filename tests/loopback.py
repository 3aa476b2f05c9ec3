"""Ranks as threads of this process: fast, deterministic sums, and strict about what meets what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending


def on_ranks(
    fn: Callable[..., Any], *args: Any, world_size: int = 2, timeout_seconds: float = 30.0
) -> list[Any]:
    """Return what `fn(transport, *args)` returned on each rank; raise what was raised first."""
    transports = LoopbackTransport.ring(world_size, timeout_seconds)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def work(transport: LoopbackTransport) -> None:
        try:
            results[transport.rank] = fn(transport, *args)
        except BaseException as error:
            errors.append(error)
            transport._hub.barrier.abort()  # nobody waits for a rank that raised

    threads = [threading.Thread(target=work, args=(t,)) for t in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def record_keys(transport: LoopbackTransport) -> list[str]:
    """A list that grows by the key of each all-reduce that this rank starts from now on."""
    keys: list[str] = []
    start = transport.all_reduce

    def all_reduce(buffer: Tensor, *, key: str) -> Pending:
        keys.append(key)
        return start(buffer, key=key)

    transport.all_reduce = all_reduce  # type: ignore[method-assign]
    return keys


def recorded(transport: LoopbackTransport) -> list[tuple[str, str, int]]:
    """A list that grows by (collective, key, nbytes) of each message of this rank."""
    messages: list[tuple[str, str, int]] = []
    reduce, gather = transport.all_reduce, transport.all_gather

    def all_reduce(buffer: Tensor, *, key: str) -> Pending:
        messages.append(("all_reduce", key, buffer.nbytes))
        return reduce(buffer, key=key)

    def all_gather(output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        messages.append(("all_gather", key, buffer.nbytes))
        return gather(output, buffer, key=key)

    transport.all_reduce = all_reduce  # type: ignore[method-assign]
    transport.all_gather = all_gather  # type: ignore[method-assign]
    return messages


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal dtype, shape and bits, so that NaN equals itself and -0.0 differs from 0.0."""
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(_as_bytes(ours), _as_bytes(theirs))


def _as_bytes(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    return real.detach().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
