"""`KeptState`: what a checkpoint has of the exchange, and how ranks take it up together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mgwfbp.engine.agreement import require_success
from lightning_mgwfbp.engine.checkpoint import STATE, ExchangeState
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.exchange.torch_transport import TorchTransport


class KeptState:
    """The state of a session, also when that has ended: a Trainer may save after fit."""

    def __init__(self) -> None:
        self._last: ExchangeState | None = None

    def forget(self) -> None:
        """Another fit begins."""
        self._last = None

    def keep(self, session: Session) -> None:
        """The session ends."""
        self._last = session.state()

    def add_to(self, checkpoint: dict[str, Any], session: Session | None) -> None:
        """Add what all ranks have left behind, on rank 0. Collective."""
        if "optimizer_states" not in checkpoint:  # one of weights only
            return
        state = self._last if session is None else session.state()
        gathered = None if state is None else state.gathered(TorchTransport.world())
        if gathered is not None:
            checkpoint[STATE] = gathered

    def take_up(self, checkpoint: Mapping[str, Any], session: Session | None) -> None:
        """Have `session` go on where the checkpoint's left off. Collective."""
        if session is not None and session.reducer.exchanger.keeps_residuals:
            session.resume(checkpoint.get(STATE))
        elif STATE in checkpoint:
            rank_zero_info(
                "This run has no use for the residuals in the checkpoint: they are lost."
            )


def load_everywhere(load: Callable[[], Any], path: object) -> Any:
    """Return what `load()` reads from `path` on this rank. Collective.

    Raises:
        ValueError: on every rank, where one cannot read.
    """
    checkpoint, failure = None, None
    try:
        checkpoint = load()
    except Exception as error:  # whatever a damaged file leads to
        said = f"{type(error).__name__}: {error}"
        failure = ValueError(f"the checkpoint '{path}' cannot be read: {said}")
        failure.__cause__ = error
    require_success(TorchTransport.world(), failure)
    return checkpoint
