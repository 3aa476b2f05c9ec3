"""What each parameter's `.grad` holds: an average that was put there, or more than that.

[Note: new] A gradient is an average if it is the very tensor that an exchange has put in `.grad`,
and nobody has written to it since (its `_version`). Anything else is new: what autograd made or
added, under whichever backward, and what the user assigned. So what the user clears is cleared, and
what lies in `.grad` when an exchange begins is part of it, as under DistributedDataParallel.

[Note: parts] While a bucket is on its way its parameters' `.grad` is None, so that whatever
autograd adds meanwhile (a second firing, a second backward) lands in a tensor of its own: a late
part.

[Note: averages] A second backward without zero_grad adds to the average A of the first in place.
A is the same on all ranks, so its mean with what is new is A plus the mean of what is new: all
ranks send A along, also those that have nothing new. DistributedDataParallel does the same.

[Note: setting aside] An exchange that keeps a residual should not be given A twice, for it would
select from A what it has sent already. So A is set aside when training's own backward begins, and
is added again when that is averaged. Where something was added to A before, under no_sync or in a
backward of the user's own, all of it is new, on that rank. So the ranks must agree on who has A
aside: where not all have, those that have it send it along, whole (`amend`).

[Note: whose memory] DistributedDataParallel writes averages where the gradients lay. So do we where
somebody would miss that: a gradient that was written to (as one is that was there when backward
began) and that others hold, or its memory, such as a flat buffer of the user's own. Any other is
let go, and `.grad` becomes a tensor in the bucket.

[Note: contributors] Where only K of P ranks contribute, the average is over these, and what a rank
contributes is multiplied by P/K, what the others have (an average, at most) by 0: the mean of that
over all ranks is the mean over the contributors. So no exchange has to know of K, and what one
leaves behind now and sends later, under another K, keeps its weight.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn


class GradientLedger:
    """Takes gradients out of `.grad` for an exchange, and puts averages in.

    Args:
        parameters: of the whole model, (N,).
        sets_aside: [Note: setting aside]; otherwise averages are sent along.

    Attributes:
        weight: of what this rank has: [Note: contributors].
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, sets_aside: bool) -> None:
        self._parameters = parameters
        self._sets_aside = sets_aside
        self.weight = 1.0
        # the average that was put in `.grad`, and its version then, (N,)
        self._averages: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(parameters)
        self._aside: dict[int, Tensor] = {}
        self._held: dict[int, Tensor] = {}  # [Note: whose memory]

    def is_new(self, i: int) -> bool:
        """Whether `.grad` holds something other than an average: [Note: new]."""
        gradient = self._parameters[i].grad
        return gradient is not None and not self._is_average(i, gradient)

    def set_averages_aside(self) -> None:
        """Called before training's own backward begins: [Note: setting aside]."""
        for i, parameter in enumerate(self._parameters) if self._sets_aside else ():
            gradient = parameter.grad
            if gradient is not None and self._is_average(i, gradient):
                self._aside[i], parameter.grad = gradient, None

    def put_back(self) -> None:
        """Undo `set_averages_aside` where no exchange followed; a new gradient stays."""
        while self._sets_aside and self._aside:
            i, average = self._aside.popitem()
            if self._parameters[i].grad is None:
                self._parameters[i].grad = average

    @property
    def has_asides(self) -> bool:
        """Whether averages are set aside that may have to be sent along."""
        return self._sets_aside and bool(self._aside)

    def take(self, i: int) -> tuple[Tensor | None, bool]:
        """Return what parameter `i` contributes, and whether it is new; leave None in `.grad`."""
        parameter = self._parameters[i]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return None, False
        if not self._is_average(i, gradient):
            if gradient._version and not gradient.is_sparse and _holders(gradient) != _NOBODY_ELSE:
                self._held[i] = gradient
            return self._weighted(gradient), True
        self._aside[i] = gradient
        return None if self._sets_aside else self._weighted(gradient), False

    def take_late(self, i: int) -> Tensor | None:
        """Return what has come to `.grad` since `take`, and leave None there."""
        parameter = self._parameters[i]
        if parameter.grad is None:  # nearly always
            return None
        late, parameter.grad = parameter.grad, None
        return self._weighted(late)

    def put(self, i: int, average: Tensor | None) -> None:
        """Put the average of what was taken in `.grad`; None: no rank had anything new, and what
        was there comes back. What is set aside stays there, for `add_back`."""
        if average is None or not self._sets_aside:
            aside = self._aside.pop(i, None)
            average = aside if average is None else average
        held = self._held.pop(i, None)
        if held is not None and average is not None and held.shape == average.shape:
            held.data.copy_(average)
            average = held
        self._put(i, average)

    def asides(self) -> dict[int, Tensor]:
        """The averages that are set aside, weighted as a part that is sent along would be."""
        return {i: self._weighted(average) for i, average in self._aside.items()}

    def add_back(self, kept: Callable[[int], bool]) -> None:
        """Add the averages that were set aside to those that were put; drop those not `kept`."""
        while self._aside:
            i, aside = self._aside.popitem()
            average = self._parameters[i].grad
            if kept(i) and average is not None:
                # the other way round a strided one could not be added to a sparse one
                sparse = average.is_sparse
                self._put(i, aside.add_(average) if sparse else average.add_(aside))

    def add(self, i: int, average: Tensor) -> None:
        """Add the average of a part that was taken later."""
        gradient = self._parameters[i].grad
        self._put(i, average if gradient is None else gradient.add_(average))

    def _put(self, i: int, average: Tensor | None) -> None:
        self._parameters[i].grad = average
        known = None if average is None else (weakref.ref(average), average._version)
        self._averages[i] = known

    def _is_average(self, i: int, gradient: Tensor) -> bool:
        known = self._averages[i]
        return known is not None and known[0]() is gradient and known[1] == gradient._version

    def _weighted(self, gradient: Tensor) -> Tensor:
        return gradient if self.weight == 1.0 else gradient * self.weight


def _holders(gradient: Tensor) -> tuple[int, int]:
    """How many hold `gradient`, and how many its memory."""
    storage = gradient.untyped_storage()
    return sys.getrefcount(gradient), torch._C._storage_Use_Count(storage._cdata)


def _holders_of_a_local() -> tuple[int, int]:
    gradient = torch.empty(1)
    return _holders(gradient)


_NOBODY_ELSE = _holders_of_a_local()
