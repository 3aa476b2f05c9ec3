"""Errors of a transport in words that say what was under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exchange_errors(rank: int, what: str) -> Iterator[None]:
    """Raise a RuntimeError that names this rank and `what` in the place of a transport's own."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"Rank {rank}: exchanging {what} failed: {str(error).rstrip('.')}. The usual cause is a"
            " rank that raised, was killed, or was stopped for longer than the timeout: read the"
            " other ranks' output first."
        ) from error
