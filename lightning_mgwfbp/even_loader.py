"""`EvenLoader`: a training loader that lasts equally long on all ranks, however much each has.

At every batch each rank says how many of its own it has had so far; the answers are on their way
while the step before is computed. A rank that has run out waits for them, and goes on with its last
batch, again and again, until all have run out.

[Note: lengths] A length is believed only so far as to tell Lightning that of the longest rank, but
for loaders that are known to keep to it: samplers estimate theirs, and loaders that resume within
an epoch have less left than it says.

[Note: looks] Only the iteration of Lightning's own fetcher is counted, and only of a loader that is
alone: a hook of one rank may have a look at some batch, and of several loaders, some of them gone
through again and again, nobody knows which one ends an epoch.

[Note: made anew] Where a user's CombinedLoader goes through Lightning's set-up again, what is in it
now is wrapped. Lightning gives a DataLoader another sampler by making it anew, from the arguments
that it finds under names of its own. The loader within has been through that: it is what is made.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_mgwfbp.batch_counts import BatchCounts, Count, unequal

_NONE_LEFT = object()
_EXACT = (  # these yield as many as they say
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)


class EvenLoader:
    """Yields on every rank as many batches as the rank with the most has.

    To isinstance it is also what it wraps, where that is a DataLoader: users ask.

    Args:
        loader: this rank's; its attributes are this one's.
        counts: joins the ranks.
        trainer: whose fit it is for.
        joins: whether ranks may run out at all.
        made_anew: what Lightning would have a DataLoader made with. [Note: made anew]
    """

    def __new__(cls, loader: Any = None, *_: Any, **made_anew: Any) -> Any:
        return loader if made_anew else object.__new__(cls)

    def __init__(
        self,
        loader: Any,
        counts: BatchCounts,
        trainer: pl.Trainer,
        joins: bool,
        **made_anew: Any,
    ) -> None:
        self.loader = loader
        given = {"loader": loader, "counts": counts, "trainer": trainer, "joins": joins}
        saved = {"args": tuple(given.values()), "kwargs": {}, "arg_names": tuple(given)}
        vars(self).update({f"__pl_saved_{name}": value for name, value in saved.items()})
        vars(self)["__dataset"] = getattr(loader, "dataset", None)
        self._counts = counts
        self._trainer = trainer
        self._joins = joins
        self._begun: deque[Count] = deque()  # of batches that were fetched and not yet stepped on
        for name in ("state_dict", "load_state_dict"):  # Lightning looks for them past __getattr__
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))
        self._lengths = self._gathered_lengths()

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not made yet: while unpickling
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        loader = vars(self).get("loader")
        return type(loader) if isinstance(loader, DataLoader) else EvenLoader

    @property
    def _iterator(self) -> Any:
        return self.loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:
        self.loader._iterator = iterator  # Lightning resets that of a DataLoader

    def __len__(self) -> int:
        """The longest rank's.

        Raises:
            TypeError: some rank does not know its own.
        """
        if not self._is_counted:
            return len(self.loader)
        known = [length for length in self._lengths if length is not None]
        if len(known) < len(self._lengths):
            raise TypeError("some rank's loader has no length")
        return max(known)

    def __iter__(self) -> Iterator[Any]:
        """Collective.

        The first batch, not this, raises a RuntimeError where some rank is known to run out: out of
        here Lightning's clean-up would hide it behind an error of its own.
        """
        if not self._is_counted or not _is_fetching():  # [Note: looks]
            return iter(self.loader)
        for count in self._begun:
            count.numbers()
        self._begun.clear()
        self._lengths = self._gathered_lengths()
        return self._batches(iter(self.loader))

    @property
    def _is_counted(self) -> bool:
        loaders = self._trainer.fit_loop._combined_loader
        return self._counts.is_open and (loaders is None or len(loaders.flattened) == 1)

    def step_begins(self) -> Count | None:
        """The count of the batch whose step begins; None: Lightning takes no step on it."""
        return self._begun.popleft() if self._begun else None

    def _gathered_lengths(self) -> Sequence[int | None]:
        return self._counts.transport.all_gather_object(sized_len(self.loader), key="lengths")

    def _require_enough(self) -> None:
        mine = exact_length(self.loader)
        lengths = self._counts.transport.all_gather_object(mine, key="exact lengths")
        known = [length for length in lengths if length is not None]
        if len(known) == len(lengths) and min(known) < self._needed(max(known)):
            raise unequal(map(str, known), min(known))

    def _needed(self, most: int) -> int:
        """How many of `most` batches the training takes."""
        trainer = self._trainer
        limit = trainer.limit_train_batches
        assert limit is not None
        needed = min(most, limit) if isinstance(limit, int) else int(most * limit)
        if trainer.max_steps < 0:
            return needed
        left = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
        return min(needed, left)

    def _batches(self, own: Iterator[Any]) -> Iterator[Any]:
        if not self._joins:
            self._require_enough()
        position = number = 0
        spare: Any = None
        while True:
            batch = next(own, _NONE_LEFT)
            is_own = batch is not _NONE_LEFT
            number += is_own
            count = self._counts.begin(position, number)
            if not is_own or position == 0:
                present = count.present()
                if not present:
                    return
                if position == 0 and len(present) < self._counts.transport.world_size:
                    spare = self._lent(batch, present[0])
            if is_own:
                spare = _copied(batch)
            else:
                own, batch = iter(()), _copied(spare)
            if batch is not None:  # Lightning passes over None
                self._begun.append(count)
            yield batch
            position += 1

    def _lent(self, batch: Any, root: int) -> Any:
        """A batch for those who have had none in this epoch, lest hooks miss what they look for."""
        transport = self._counts.transport
        mine = batch if transport.rank == root else None
        return transport.broadcast_object(mine, root, key="a batch to lend")


def exact_length(loader: object) -> int | None:
    """How many batches it has; None: they may be others than it says."""
    if is_plain(loader) and type(loader.sampler) in _EXACT:
        return len(loader)
    return None


def is_plain(loader: object) -> TypeGuard[DataLoader[Any]]:
    """Whether its sampler alone decides how many batches it has."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(loader.batch_sampler) is BatchSampler
    )


def _is_fetching() -> bool:
    """Whether it is Lightning's fetcher that iterates."""
    frame = sys._getframe(1)
    while frame is not None and not isinstance(frame.f_locals.get("self"), _DataFetcher):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _copied(batch: Any) -> Any:
    """The same tensors in containers of their own, which hooks may change."""
    return pytree.tree_map(lambda leaf: leaf, batch)
