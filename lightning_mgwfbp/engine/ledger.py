"""What each parameter's `.grad` holds: something new, an average, or both apart.

[Note: parts] While a bucket is on its way its parameters' `.grad` is None, so that whatever
autograd adds meanwhile (a second firing, a second backward) lands in a tensor of its own: a late
part. Averages of an earlier exchange that are still in `.grad` when new gradients arrive are set
aside and added back, so that each gradient is averaged once.
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
        self._is_average = [False] * len(parameters)  # unless the user has replaced it since
        self._aside: dict[int, Tensor] = {}

    def set_average_aside(self, i: int, _: object = None) -> None:
        """Before autograd adds to an average in place: move it out of the way."""
        if self._is_average[i]:
            self._is_average[i] = False
            parameter = self._parameters[i]
            if parameter.grad is not None:
                self._aside[i], parameter.grad = parameter.grad, None

    def take(self, i: int) -> Tensor | None:
        """Return what is new for parameter `i`, and leave None; set aside what is older.

        Raises:
            TypeError: a sparse gradient.
        """
        parameter = self._parameters[i]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            self.is_new[i] = False  # what was accumulated has been thrown away
            return None
        if not self.is_new[i]:
            self._aside[i] = gradient
            return None
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"The gradient of {self._names[i]!r} is sparse, which cannot be exchanged yet:"
                " build its module with sparse=False."
            )
        return gradient

    def put(self, i: int, average: Tensor | None) -> Tensor | None:
        """Put the average of what was taken in `.grad`; None: no rank had anything.

        Returns:
            What has arrived in `.grad` since it was taken, a late part.
        """
        parameter = self._parameters[i]
        late = parameter.grad
        aside = self._aside.pop(i, None)
        if average is None:
            parameter.grad = aside
        else:
            parameter.grad = average if aside is None else average.add_(aside)
        self.is_new[i] = False
        self._is_average[i] = True
        return late

    def add(self, i: int, average: Tensor) -> None:
        """Add the average of a part that was taken later."""
        parameter = self._parameters[i]
        parameter.grad = average if parameter.grad is None else parameter.grad.add_(average)
        self.is_new[i] = False
        self._is_average[i] = True
