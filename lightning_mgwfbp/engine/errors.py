"""Errors of a transport in words that say what was under way, and which rank is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_mgwfbp.exchange.roll_call import RollCall

_USUALLY = (
    "The usual cause is a rank that raised, was killed, or was stopped for longer than the timeout"
)
_NETWORKS = ("torch.distributed", "horovod")


class ExchangeError(RuntimeError):
    """An exchange failed, most likely because of another rank."""


@contextmanager
def exchange_errors(rank: int, what: str) -> Iterator[None]:
    """Raise an ExchangeError that names this rank and `what` in the place of a transport's own."""
    outer, RollCall.doing = RollCall.doing, what
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ExchangeError):
            raise
        trouble = f"Rank {rank}: exchanging {what} failed: {_words(error)}"
        raise ExchangeError(f"{trouble}. {_advice(f'exchanging {what}')}") from error
    finally:
        RollCall.doing = outer


def explain(error: BaseException) -> None:
    """Give `error`, which ends this rank's training, its cause if that lies in other ranks; tell
    them of it if it does not."""
    if isinstance(error, ExchangeError):
        return
    if isinstance(error, RuntimeError) and _is_from_network(error):
        error.args = (f"{_words(error)}. {_advice('in a collective outside of any exchange')}",)
    elif present := RollCall.present():
        first_line = str(error).partition("\n")[0]
        present.tell(": ".join(filter(None, (type(error).__name__, first_line))))


def require_presence() -> None:
    """Raise if a rank does not answer; for where something has taken long, and nobody says why.

    Raises:
        ExchangeError: naming the missing rank.
    """
    present = RollCall.present()
    if present is not None and (missing := present.missing()):
        raise ExchangeError(
            f"Nothing came within the timeout. {missing}: read the other ranks' output first."
        )


def _advice(trouble: str) -> str:
    present = RollCall.present()
    found = _USUALLY if present is None else present.ask(trouble)
    return f"{found}: read the other ranks' output first."


def _words(error: BaseException) -> str:
    return str(error).rstrip(".")


def _is_from_network(error: BaseException) -> bool:
    """Whether it comes out of a collective, Lightning's own or a metric's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return module.startswith(_NETWORKS)
