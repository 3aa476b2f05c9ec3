"""What each parameter's `.grad` holds: something new, an average, or both.

[Note: parts] While a bucket is on its way its parameters' `.grad` is None, so that whatever
autograd adds meanwhile (a second firing, a second backward) lands in a tensor of its own: a late
part.

[Note: averages] A second backward without zero_grad adds to the average A of the first in place.
A is the same on all ranks, so its mean with what is new is A plus the mean of what is new: all
ranks send A along, also those that have nothing new. DistributedDataParallel does the same.

[Note: setting aside] An exchange that keeps a rest of what it is given must not be given A twice.
There A is set aside before autograd adds to it, and put back afterwards.

[Note: contributors] Where only K of P ranks contribute, the average is over these, and what a rank
contributes is multiplied by P/K, what the others have (an average, at most) by 0: the mean of that
over all ranks is the mean over the contributors. So no exchange has to know of K, and what one
leaves behind now and sends later, under another K, keeps its weight.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class GradientLedger:
    """Takes new gradients out of `.grad` for an exchange, and puts averages in.

    Args:
        parameters: of the whole model, (N,).
        sets_aside: [Note: setting aside]; otherwise averages are sent along.

    Attributes:
        is_new: whether something was accumulated since the last exchange, (N,).
        weight: of what this rank has: [Note: contributors].
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, sets_aside: bool) -> None:
        self._parameters = parameters
        self._sets_aside = sets_aside
        self.is_new = [False] * len(parameters)
        self.weight = 1.0
        self._aside: dict[int, Tensor] = {}
        self._taken: set[int] = set()

    def set_aside(self, i: int) -> None:
        """Called before autograd adds to `.grad`: [Note: setting aside]."""
        parameter = self._parameters[i]
        if parameter.grad is None:
            if i not in self._taken:
                self._aside.pop(i, None)  # the user has cleared the gradient, average and all
        elif not self.is_new[i]:
            self._aside[i], parameter.grad = parameter.grad, None

    def take(self, i: int) -> Tensor | None:
        """Return what parameter `i` contributes, and leave None in `.grad`.

        Afterwards `is_new[i]` says whether it is more than an average.
        """
        parameter = self._parameters[i]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            self.is_new[i] = False  # what was accumulated has been thrown away
            self._aside.pop(i, None)
            return None
        self._taken.add(i)
        if self.is_new[i]:
            return self._weighted(gradient)
        self._aside[i] = gradient
        return None if self._sets_aside else self._weighted(gradient)

    def put(self, i: int, average: Tensor | None) -> Tensor | None:
        """Put the average of what was taken in `.grad`; None: no rank had anything new, and what
        was there comes back.

        Returns:
            What has arrived in `.grad` since it was taken, a late part.
        """
        parameter = self._parameters[i]
        late = parameter.grad
        aside = self._aside.pop(i, None)
        if average is None:
            parameter.grad = aside
        elif aside is not None and self._sets_aside:
            # the other way round a strided one could not be added to a sparse one
            parameter.grad = aside.add_(average) if average.is_sparse else average.add_(aside)
        else:
            parameter.grad = average
        self._taken.discard(i)
        self.is_new[i] = False
        return None if late is None else self._weighted(late)

    def add(self, i: int, average: Tensor) -> None:
        """Add the average of a part that was taken later."""
        parameter = self._parameters[i]
        parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        self._taken.discard(i)
        self.is_new[i] = False

    def _weighted(self, gradient: Tensor) -> Tensor:
        return gradient if self.weight == 1.0 else gradient * self.weight
