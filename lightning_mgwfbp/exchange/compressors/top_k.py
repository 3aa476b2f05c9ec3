"""`TopK`: send the elements of largest magnitude, as pairs of value and position."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from lightning_mgwfbp.exchange.compressors.base import Moment, Selection, Wire
from lightning_mgwfbp.exchange.compressors.schedule import (
    Schedule,
    Unit,
    checked_density,
    checked_schedule,
    scheduled_density,
)
from lightning_mgwfbp.exchange.compressors.selection import SELECTIONS
from lightning_mgwfbp.plan.records import is_number, require_count
from lightning_mgwfbp.plan.sparse_costs import MOST_INT32_INDEXED, TopKPairs, selected

_DENSITY_FLOOR = 0.001


@dataclass(frozen=True)
class TopK(Selection):
    """Send the k = max(1, round(density * numel)) elements of largest magnitude.

    Deep Gradient Compression (Lin et al., ICLR'18), whose momentum correction, local clipping and
    density warm-up it offers. What is not finite ranks above all that is.

    Args:
        density: fraction of the elements that travels, in (0, 1]; "auto" leaves it to the plan,
            for each merge group the largest that hides behind computation.
        selection: "exact" sorts in part; "sampled" finds the same elements with the help of a
            sample, faster for large merge groups on a CPU; "auto" takes the faster one.
        density_schedule: a density for each epoch or step, after which `density` holds, or a
            function from epoch or step to density.
        schedule_unit: "epoch" or "step".
        momentum_correction: accumulate velocities locally with this momentum, in [0, 1), and send
            their sums; for an optimizer that has no momentum of its own.
        local_clip_norm: clip the norm of each rank's whole gradient (but for sparse ones) to this
            times sqrt(1/P) first.
        dense_below_numel: parameters of fewer elements travel exactly.
        density_floor: with "auto", the plan does not go below it; 0.001 if not given.

    Raises:
        ValueError: an argument is none of these.

    Example:
        >>> TopK(density=0.001, density_schedule=[0.25, 0.0625, 0.015625, 0.004]).density_at(1, 500)
        0.0625
    """

    density: float | Literal["auto"] = 0.01
    selection: Literal["exact", "sampled", "auto"] = "auto"
    density_schedule: Schedule | None = None
    schedule_unit: Unit = "epoch"
    momentum_correction: float = 0.0
    local_clip_norm: float | None = None
    dense_below_numel: int = 4096
    density_floor: float | None = None

    def __post_init__(self) -> None:
        schedule = checked_schedule("TopK", self.density_schedule, self.schedule_unit)
        object.__setattr__(self, "density_schedule", schedule)
        self._check_density()
        if not isinstance(self.selection, str) or self.selection not in SELECTIONS:
            raise ValueError(
                f"`TopK(selection=...)` must be one of {sorted(SELECTIONS)},"
                f" got {self.selection!r}."
            )
        if not is_number(self.momentum_correction) or not 0 <= self.momentum_correction < 1:
            raise ValueError(
                "`TopK(momentum_correction=...)` must be in [0, 1), 0 for none,"
                f" got {self.momentum_correction!r}."
            )
        limit = self.local_clip_norm
        if limit is not None and (not is_number(limit) or not 0 < limit < math.inf):
            raise ValueError(
                "`TopK(local_clip_norm=...)` must be a finite number above 0, or None for no"
                f" clipping, got {self.local_clip_norm!r}."
            )
        require_count("`TopK(dense_below_numel=...)`", self.dense_below_numel)

    def _check_density(self) -> None:
        if self.density == "auto":
            if self.density_schedule is not None:
                raise ValueError(
                    "`TopK(density='auto')` leaves densities to the plan, `density_schedule=...`"
                    " sets them: leave one out."
                )
            floor = _DENSITY_FLOOR if self.density_floor is None else self.density_floor
            floor = checked_density("`TopK(density_floor=...)`", floor)
            object.__setattr__(self, "density_floor", floor)
        else:
            choices = "in (0, 1] or 'auto'"
            density = checked_density("`TopK(density=...)`", self.density, choices=choices)
            object.__setattr__(self, "density", density)
            if self.density_floor is not None:
                warnings.warn(
                    f"`TopK(density_floor={self.density_floor!r})` has no effect unless"
                    " `density='auto'`.",
                    stacklevel=4,
                )

    @property
    def settled_density(self) -> float:
        density = self.density_floor if self.density == "auto" else self.density
        assert density is not None
        return density

    @property
    def plan_chooses_density(self) -> bool:
        return self.density == "auto"

    @property
    def asks_a_function(self) -> bool:
        return callable(self.density_schedule)

    def density_at(self, epoch: int, step: int) -> float:
        return scheduled_density(
            self.density_schedule,
            self.schedule_unit,
            epoch=epoch,
            step=step,
            after=self.settled_density,
        )

    def encode(self, buffer: Tensor, moment: Moment) -> Wire:
        """Return values, (k,), and their positions, (k,)."""
        k = selected(buffer.numel(), moment.density)
        indices = SELECTIONS[self.selection](buffer, k)
        fits = buffer.numel() <= MOST_INT32_INDEXED
        return buffer[indices], indices.to(torch.int32 if fits else torch.int64)

    def decode(self, wire: Wire, total: Tensor, moment: Moment, weight: float = 1.0) -> None:
        values, indices = wire
        total.index_add_(0, indices, values, alpha=weight)

    def mask(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
        _, indices = wire
        buffer.index_fill_(0, indices.long(), 0)

    def wire_nbytes(
        self, numel: ArrayLike, itemsize: ArrayLike, density: float = 1.0
    ) -> NDArray[np.float64]:
        numels = np.asarray(numel, dtype=np.float64)
        return TopKPairs(density)(numels, np.asarray(itemsize, dtype=np.float64))
