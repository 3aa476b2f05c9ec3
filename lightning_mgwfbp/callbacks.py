"""`WarmupCallback`: tells the warm-up where steps and backwards begin, and hands on its plan.

It drives training no differently than without it: no batch is consumed, repeated or lost.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from typing_extensions import override

from lightning_mgwfbp.plan_table import print_plan

if TYPE_CHECKING:
    from lightning_mgwfbp.engine.session import Session
    from lightning_mgwfbp.engine.warmup import Tuned
    from lightning_mgwfbp.exchanging import ExchangingStrategy
    from lightning_mgwfbp.preemption import Preemption
    from lightning_mgwfbp.uneven_inputs import UnevenInputs


class WarmupCallback(pl.Callback):
    """Profiles the first steps of fit for the strategy, which adds one itself where none is given.

    Args:
        save_dir: where rank 0 writes profile.json, link.json and plan.json, to be given back as
            the strategy's `profile=`, `link=` or `planner=`.
    """

    def __init__(self, save_dir: str | None = None) -> None:
        self._save_dir = save_dir
        self._strategy: ExchangingStrategy | None = None
        self._steps_seen = 0
        self._unlogged: Tuned | None = None  # a plan whose numbers no logger has yet

    @classmethod
    def of(cls, trainer: pl.Trainer) -> WarmupCallback:
        """The user's own, or a new one, at the head of the trainer's callbacks: those behind it
        find complete updates."""
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        given = [c for c in callbacks if isinstance(c, cls)] or [cls()]
        callbacks[:] = given + [c for c in callbacks if c not in given]
        return given[0]

    def attach(self, strategy: ExchangingStrategy) -> None:
        """Called by the strategy in its setup."""
        self._strategy = strategy
        self._unlogged = None

    def session_begins(self) -> None:
        """Called by the strategy when its session is open."""
        session = self._session
        assert session is not None
        if session.saved_plan is not None and self._save_dir is not None:
            rank_zero_warn(
                f"`WarmupCallback(save_dir={self._save_dir!r})` has no effect with a saved plan as"
                " `planner=...`: nothing is measured."
            )
        tuned = session.warmup.start()
        if tuned is not None:
            self._on_plan(tuned)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._strategy is None:
            rank_zero_warn("WarmupCallback has no effect without Trainer(strategy='mgwfbp').")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps_seen = trainer.global_step
        if self._preemption is not None:
            self._preemption.begin()
        if self._inputs is not None:
            self._inputs.require_one_loader()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        session = self._session
        if self._preemption is not None:
            self._preemption.batch_begins()
        if session is not None and self._inputs is not None:
            self._inputs.step_begins(batch_idx)
            if not self._inputs.stands_by:
                session.warmup.forward_begins()
            # not in on_train_epoch_start, which does not run where fit is resumed within an epoch
            session.set_epoch(trainer.current_epoch)
        # at set-up the step was not known: a checkpoint that is resumed changes it
        self._log_plan(trainer)

    @override
    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        if self._session is not None:
            self._session.warmup.backward_begins()

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        session = self._session
        if session is None:
            return
        if self._preemption is not None:
            self._preemption.batch_ends()
        if trainer.global_step == self._steps_seen:
            return  # an accumulation window goes on
        self._steps_seen = trainer.global_step
        tuned = session.warmup.step_ended()
        if tuned is not None:
            self._on_plan(tuned)
            self._log_plan(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()
        if self._inputs is not None:
            self._inputs.epoch_ends()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._flush()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if self._strategy is not None:
            self._strategy.explain(exception)
        with suppress(RuntimeError):  # of the network: there is an exception already
            self._flush()

    def _flush(self) -> None:
        if self._session is not None:
            self._session.flush()

    def _log_plan(self, trainer: pl.Trainer) -> None:
        """Log the new plan's numbers, if there is one, beside what Lightning logs of this batch.

        Many loggers refuse a step lower than the last one, and Lightning counts batches that
        stepped, not optimizer steps: by hand there may be several in a batch.
        """
        tuned, self._unlogged = self._unlogged, None
        if tuned is not None:
            for logger in trainer.loggers:
                logger.log_metrics(
                    tuned.metrics(), step=trainer.fit_loop.epoch_loop._batches_that_stepped
                )

    @property
    def _inputs(self) -> UnevenInputs | None:
        return None if self._strategy is None else self._strategy.inputs

    @property
    def _preemption(self) -> Preemption | None:
        return None if self._strategy is None else self._strategy.preemption

    @property
    def _session(self) -> Session | None:
        return None if self._strategy is None else self._strategy.session

    def _on_plan(self, tuned: Tuned) -> None:
        """Show the new plan, save what it was made from, and have its numbers logged."""
        assert self._strategy is not None
        self._strategy.tuned = self._unlogged = tuned
        if not self._strategy.is_global_zero:
            return
        print_plan(tuned)
        if self._save_dir is not None:
            folder = Path(self._save_dir)
            folder.mkdir(parents=True, exist_ok=True)
            tuned.profile.save(folder / "profile.json")
            tuned.link.save(folder / "link.json")
            tuned.plan.save(folder / "plan.json")
