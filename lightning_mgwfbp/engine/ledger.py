"""What each parameter's `.grad` holds: something new, an average, or both.

[Note: parts] While a bucket is on its way its parameters' `.grad` is None, so that whatever
autograd adds meanwhile (a second firing, a second backward) lands in a tensor of its own: a late
part.

[Note: averages] A second backward without zero_grad adds to the average A of the first in place.
A is the same on all ranks, so its mean with what is new is A plus the mean of what is new: all
ranks send A along, also those that have nothing new. DistributedDataParallel does the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class GradientLedger:
    """Takes new gradients out of `.grad` for an exchange, and puts averages in.

    Args:
        names, parameters: of the whole model, (N,) each.

    Attributes:
        is_new: whether something was accumulated since the last exchange, (N,).
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
        self._names = names
        self._parameters = parameters
        self.is_new = [False] * len(parameters)
        self._aside: dict[int, Tensor] = {}

    def take(self, i: int) -> Tensor | None:
        """Return what parameter `i` contributes, and leave None in `.grad`.

        Afterwards `is_new[i]` says whether it is more than an average, [Note: averages].

        Raises:
            TypeError: a sparse gradient.
        """
        parameter = self._parameters[i]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            self.is_new[i] = False  # what was accumulated has been thrown away
        elif not self.is_new[i]:
            self._aside[i] = gradient
        elif gradient.layout is not torch.strided:
            raise TypeError(
                f"The gradient of {self._names[i]!r} is sparse, which cannot be exchanged yet:"
                " build its module with sparse=False."
            )
        return gradient

    def put(self, i: int, average: Tensor | None) -> Tensor | None:
        """Put the average of what was taken in `.grad`; None: no rank had anything new, and what
        was there comes back.

        Returns:
            What has arrived in `.grad` since it was taken, a late part.
        """
        parameter = self._parameters[i]
        late = parameter.grad
        aside = self._aside.pop(i, None)
        parameter.grad = aside if average is None else average
        self.is_new[i] = False
        return late

    def add(self, i: int, average: Tensor) -> None:
        """Add the average of a part that was taken later."""
        parameter = self._parameters[i]
        parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        self.is_new[i] = False
