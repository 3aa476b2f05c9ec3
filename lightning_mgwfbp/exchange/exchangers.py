"""Bucket in, averaged bucket out, asynchronously. Nobody above exchangers divides by world_size.

The factor 1/P is applied before the sum, as DistributedDataParallel does: two ranks then get its
bits, and a narrow wire format cannot overflow in the sum. Where whole gradients are summed, it is
applied as they are packed: one pass over memory less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressors.cast import Cast
from lightning_mgwfbp.exchange.transport import Pending, Transport


class Exchange(Protocol):
    """A bucket on its way."""

    def finish(self) -> None:
        """Return once the bucket holds the averages."""


class Exchanger(ABC):
    """Averages buckets over the ranks of `transport`, and keeps what it leaves behind.

    What it leaves behind is kept in two phases: `start` and `finish` write it aside, and `conclude`
    looks whether the averages are finite. `settle` makes it valid then, once the averages are used,
    or drops it; `discard` drops it in any case.

    Attributes:
        share: what buckets are best packed with, `Bucket.pack(share=...)`.
        gradient_scale: says what the gradients are multiplied by (a GradScaler's loss scale).
        epoch: of the training, for schedules.
    """

    share: float = 1.0
    gradient_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    epoch: int = 0

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    @property
    def keeps_residuals(self) -> bool:
        """Whether not all of a gradient is sent: what was averaged before must not be again."""
        return False

    @property
    def needs_whole_gradient(self) -> bool:
        """Whether nothing can be started before backward has ended and `prepare` was called."""
        return False

    def compresses(self, parameter: Tensor) -> bool:
        """Whether the gradient of `parameter` may travel other than exactly."""
        return False

    def adopt(
        self,
        buckets: Sequence[Bucket],
        pieces: Sequence[int] = (),
        gather_order: Sequence[int] = (),
    ) -> None:
        """Be ready for these, in the place of those before; between two exchanges.

        Args:
            buckets: in the order in which they will be started.
            pieces: how many messages each is cut into, where an exchange has two halves.
            gather_order: the order of their second halves, each bucket as often as it has pieces.
                Both, or none.
        """

    def prepare(self, gradients: Iterable[Tensor]) -> None:
        """See all that this rank is about to contribute."""

    @abstractmethod
    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> Exchange:
        """Start to replace the content of `bucket` by its mean over the ranks.

        Args:
            bucket: packed; its first `body_numel` numbers may be compressed.
            key: names the exchange.
            density: what the plan chose for this bucket: 1.0 for whole; None where the choice is
                the exchanger's.
        """

    def conclude(self, others: Iterable[Tensor] = ()) -> None:
        """End a step whose exchanges are all finished; the same on all ranks.

        Args:
            others: averages of this step that were exchanged elsewhere, of any shapes.
        """

    def settle(self) -> None:
        """Take the averages of the last step for used."""

    def discard(self) -> None:
        """Take the averages of the last step, unless they were used, for thrown away: what it has
        left behind is dropped, and the step is not counted. Not if other buckets have been adopted
        since, as where parameters have joined in that very step: then it is kept."""

    def forget(self, names: Collection[str]) -> None:
        """Drop what is kept of these parameters, which are others now."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: what was left behind, by parameter name."""
        return {}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Take up the state of a run of `len(states)` ranks; the mean over ranks is kept."""

    def close(self) -> None:
        """End what goes on beside the caller; also in the middle of an exchange."""


class DenseExchanger(Exchanger):
    """All-reduces every element, in the bucket's own dtype or in a narrower one.

    Args:
        transport: carries the messages.
        cast: the wire format, or None.
    """

    def __init__(self, transport: Transport, cast: Cast | None = None) -> None:
        super().__init__(transport)
        self.share = 1.0 / transport.world_size
        self._cast = cast

    def start(self, bucket: Bucket, *, key: str, density: float | None = None) -> Exchange:
        bucket.scale_to(self.share)
        buffer = bucket.buffer
        wire = buffer if self._cast is None else self._cast.narrowed(buffer)
        return _DenseExchange(buffer, wire, self.transport.all_reduce(wire, key=key))


class _DenseExchange:
    def __init__(self, buffer: Tensor, wire: Tensor, pending: Pending) -> None:
        self._buffer = buffer
        self._wire = wire
        self._pending = pending

    def finish(self) -> None:
        self._pending.wait()
        if self._wire is not self._buffer:
            self._buffer.copy_(self._wire)


class FeedbackExchanger(Exchanger):
    """One that keeps residuals, in unscaled units and in two phases.

    What a step leaves behind is written aside; `_commit` is called if its averages turn out to be
    finite, and are used, else `_drop`.
    """

    keeps_residuals = True

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._started: list[Bucket] = []
        self._scale: float | None = None
        self._is_right: bool | None = None  # what was written aside; None: nothing was

    @property
    def loss_scale(self) -> float:
        """What this step's gradients are multiplied by."""
        if self._scale is None:  # asked once for each step: on a GPU it waits for the device
            self._scale = self.gradient_scale()
        return self._scale

    def note_started(self, bucket: Bucket) -> None:
        """To be called first by `start`: the averages of the step before were used, or added to."""
        self.settle()
        self._started.append(bucket)

    def conclude(self, others: Iterable[Tensor] = ()) -> None:
        self._is_right = all_finite(*(bucket.data for bucket in self._started), *others)
        self._started = []
        self._scale = None

    def settle(self) -> None:
        is_right, self._is_right = self._is_right, None
        if is_right is not None:
            (self._commit if is_right else self._drop)()

    def discard(self) -> None:
        if self._is_right is not None:
            self._is_right = None
            self._drop()

    @abstractmethod
    def _commit(self) -> None:
        """Make valid what the step has left behind."""

    @abstractmethod
    def _drop(self) -> None:
        """Forget it."""


def all_finite(*tensors: Tensor) -> bool:
    """Whether no number in `tensors` is infinite or NaN. Waits for the device, once."""
    # least and greatest pass on NaN, and take one pass without a temporary
    numbers = [n for n in map(_stored, tensors) if n.numel()]
    extremes = [torch.stack(torch.aminmax(n)) for n in numbers]
    finite = [torch.isfinite(e).all().to(extremes[0].device) for e in extremes]
    return not finite or bool(torch.stack(finite).all())


def _stored(tensor: Tensor) -> Tensor:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values) if values.is_complex() else values
