"""`Preemption`: SIGTERM, on whichever rank, ends training on all of them after the same batch.

Lightning's own handler broadcasts from wherever the main thread is: rank 0 then waits for ranks
that wait for its gradients, until the timeout. And every rank goes by its own flag, at its next end
of a batch, so that checkpoints on the way out are begun at different ones.

Here the handler only takes note. Rank 0 sets a last batch, and goes on when all ranks have heard of
it. None can be past it by then, for none begins a batch before rank 0 does, whose broadcast comes
first. After that batch all ranks raise Lightning's SIGTERMException.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

import lightning.pytorch as pl

from lightning_mgwfbp.exchange.roll_call import RollCall


class Preemption:
    """Looks out for SIGTERM during one fit.

    Args:
        trainer: whose fit it is.
        roll: by which the ranks tell each other.
    """

    def __init__(self, trainer: pl.Trainer, roll: RollCall) -> None:
        self._trainer = trainer
        self._roll = roll
        self._received = False
        self._has_told = False
        self._batches = 0  # begun

    def begin(self) -> None:
        """Take the place of Lightning's handler, until Lightning puts back the one before both."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def batch_begins(self) -> None:
        """To be called on every rank before anything of a batch is exchanged.

        Raises:
            RuntimeError: a rank does not hear of the end, told twice.
        """
        self._batches += 1
        rank = self._trainer.global_rank
        if self._has_told or not (self._received or (rank == 0 and self._roll.end_is_wanted)):
            return
        self._has_told = True
        if rank != 0:
            self._roll.want_end()
            return
        last = self._batches + 1
        # a rank on a busy machine may be slow to answer, but hardly twice
        if missing := self._roll.end_after(last) and self._roll.end_after(last):
            raise RuntimeError(f"Rank 0 has received SIGTERM, but cannot tell: {missing}.")

    def batch_ends(self) -> None:
        """Have Lightning raise SIGTERMException if this batch is the last one."""
        last = self._roll.last_batch
        if last is not None and self._batches >= last:
            self._trainer._signal_connector.received_sigterm = True

    def _on_sigterm(self, number: int, frame: Any) -> None:
        launcher = self._trainer.strategy.launcher
        if not self._received and launcher is not None:
            launcher.kill(number)  # as Lightning's own does: to the ranks that it has started
        self._received = True
        users = self._trainer._signal_connector._original_handlers.get(signal.SIGTERM)
        if callable(users):
            users(number, frame)
