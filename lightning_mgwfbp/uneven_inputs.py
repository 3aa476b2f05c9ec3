"""`UnevenInputs`: ranks that have run out of training batches stand by, or end the training.

A rank that stands by goes through all of Lightning's step, with a loss of zero that depends on no
parameter. It contributes nothing, and the average is over the ranks that do, those that had a batch
when the accumulation window began: `torch.distributed.algorithms.join` with
divide_by_initial_world_size=False, but that what was accumulated before is not lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.utils import _pytree as pytree
from torch.utils.data import DistributedSampler

from lightning_mgwfbp.batch_counts import BatchCounts
from lightning_mgwfbp.engine.agreement import require_success
from lightning_mgwfbp.even_loader import EvenLoader, is_plain
from lightning_mgwfbp.exchange.transport import Transport

OnUneven = Literal["error", "join"]


class UnevenInputs:
    """Knows which ranks have batches of their own, during one fit.

    Args:
        trainer: whose fit it is.
        transport: joins the ranks.
        on_uneven: what becomes of ranks that have run out.
        timeout: how long another rank may be behind.

    Attributes:
        present: the ranks that have one in the present step.
        contributors: those that had one when the accumulation window began.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        transport: Transport,
        on_uneven: OnUneven,
        timeout: timedelta | None,
    ) -> None:
        self._trainer = trainer
        self._transport = transport
        self._joins = on_uneven == "join"
        self._timeout = timeout
        self._counts: BatchCounts | None = None
        self._in_training_step = False
        self._had_batches: set[int] = set()  # in this epoch
        self._everyone = range(transport.world_size)
        self.present: Sequence[int] = self._everyone
        self.contributors: Sequence[int] = self._everyone

    @property
    def stands_by(self) -> bool:
        """Whether this rank has no batch of its own in the present step."""
        return self._transport.rank not in self.present

    def evened(self, loader: object) -> object:
        """One that lasts equally long on all ranks: `loader` itself if it does, or is not for
        training. Collective."""
        if isinstance(loader, EvenLoader):  # of an earlier fit
            loader = loader.loader
        if not self._trainer.training:
            return loader
        if _takes_dataloader_iter(self._trainer):
            return loader  # nobody knows when a batch is fetched
        mine = _fixed_length(loader)
        lengths = self._transport.all_gather_object(mine, key="fixed lengths")
        if mine is not None and len(set(lengths)) == 1:
            return loader
        if self._counts is None:
            self._counts = BatchCounts(self._timeout)
        return EvenLoader(loader, self._counts, self._trainer, self._joins)

    def require_one_loader(self) -> None:
        """Refuse to join where batches have parts from several loaders.

        Raises:
            ValueError: they do.
        """
        loaders = pytree.tree_leaves(self._trainer.train_dataloader)
        if self._joins and len(loaders) > 1 and any(isinstance(e, EvenLoader) for e in loaders):
            raise _cannot_join(
                f"there are {len(loaders)} training dataloaders, and a rank would run out of one"
                " before it runs out of another"
            )

    def step_begins(self, batch_idx: int) -> None:
        """Learn who has the batch that the coming step is for. Collective.

        Raises:
            RuntimeError: not all have, and nobody joins.
        """
        self.present = self._everyone
        for loader in pytree.tree_leaves(self._trainer.train_dataloader):
            count = loader.step_begins() if isinstance(loader, EvenLoader) else None
            if count is None:
                continue
            self.present = count.present()
            if not self._joins and len(self.present) < len(self._everyone):
                raise count.error()
        self._had_batches.update(self.present)
        if batch_idx % self._trainer.accumulate_grad_batches == 0:
            self.contributors = self.present

    @contextmanager
    def training_step(self) -> Iterator[None]:
        """To be held around the user's, which ranks that stand by do not call."""
        self._in_training_step = True
        try:
            yield
        finally:
            self._in_training_step = False

    def require_outside(self, what: str) -> None:
        """Refuse a collective of all ranks within the user's training_step.

        Raises:
            RuntimeError: some rank might not take part.
        """
        if self._in_training_step and self._joins and self._counts is not None:
            raise RuntimeError(
                f"{what} within `training_step` waits for all ranks, but with"
                ' `MGWFBPStrategy(uneven_inputs="join")` one that has run out of batches does not'
                " call it. Log with on_step=False, on_epoch=True, or do it in"
                " `on_train_batch_end`, which every rank calls."
            )

    def epoch_ends(self) -> None:
        """Refuse what would wait for ever for a rank that has called no training_step. Collective
        where there is one.

        Raises:
            RuntimeError: it has not logged what the others are about to average.
        """
        had, self._had_batches = self._had_batches, set()
        without = sorted(set(self._everyone) - had)
        if not without or self._counts is None:
            return
        logged = _averaged_at_epoch_end(self._trainer)
        everyone = self._counts.transport.all_gather_object(logged, key="logged")
        missing = sorted(set[str]().union(*everyone) - set[str].intersection(*everyone))
        if missing:
            raise RuntimeError(
                f"Ranks {without} had no training batch in this epoch, and so have not logged"
                f" {', '.join(missing)}, which is to be averaged over all ranks. Log it without"
                " sync_dist=True, or give every rank a batch."
            )

    def zero_loss(self) -> Tensor:
        """The loss of a rank that stands by."""
        return torch.zeros((), device=self._trainer.strategy.root_device, requires_grad=True)

    def close(self) -> None:
        """End counting: wrapped loaders are plain ones from then on."""
        if self._counts is not None:
            self._counts.close()


def require_joinable(trainer: pl.Trainer, transport: Transport) -> None:
    """Refuse what ranks that stand by cannot take part in. Collective.

    Raises:
        ValueError: on every rank, naming it as the user typed it.
    """
    reason = next(_obstacles(trainer), None)
    require_success(transport, None if reason is None else _cannot_join(reason))


def _obstacles(trainer: pl.Trainer) -> Iterator[str]:
    module = trainer.lightning_module
    name = type(module).__name__
    if not module.automatic_optimization:
        yield (
            f"{name} optimizes manually (`automatic_optimization=False`), and a rank that has run"
            " out of batches does not know how often the others exchange gradients"
        )
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        yield (
            "SyncBatchNorm (`Trainer(sync_batchnorm=True)`) waits in each forward for all ranks,"
            " and one that has run out of batches has none"
        )
    if _takes_dataloader_iter(trainer):
        yield f"`{name}.training_step(dataloader_iter)` fetches batches itself"
    if is_overridden("backward", module):
        yield f"`{name}.backward` is not for the loss of a rank that has run out of batches"
    if any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
        yield "LBFGS decides by each rank's own loss how often it asks for gradients"


def _cannot_join(reason: str) -> ValueError:
    return ValueError(
        f'`MGWFBPStrategy(uneven_inputs="join")` cannot work: {reason}. Leave it out, and give all'
        " ranks equally many batches."
    )


def _takes_dataloader_iter(trainer: pl.Trainer) -> bool:
    step = trainer.lightning_module.training_step
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def _fixed_length(loader: object) -> int | None:
    """How many batches it has in every epoch; None: they may be others than it says.

    A DistributedSampler, Lightning's own or the user's, keeps to a length set once for all.
    """
    if not is_plain(loader):
        return None
    sampler = loader.sampler
    keeps_it = (
        isinstance(sampler, DistributedSampler)
        and type(sampler).__len__ is DistributedSampler.__len__
    )
    return len(loader) if keeps_it else None


def _averaged_at_epoch_end(trainer: pl.Trainer) -> set[str]:
    results = trainer._results
    assert results is not None
    return {
        key
        for key, metric in results.valid_items()
        if metric.meta.on_epoch and (metric.meta.sync.should or not metric.is_tensor)
    }
