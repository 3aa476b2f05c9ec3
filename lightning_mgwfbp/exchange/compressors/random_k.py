"""`RandomK`: send elements drawn at random, the same positions on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
from lightning_mgwfbp.plan import selected
from lightning_mgwfbp.plan.records import require_count


@dataclass(frozen=True)
class RandomK(Selection):
    """Send k = max(1, round(density * numel)) elements at positions that all ranks draw alike.

    So only values travel, and they are summed on the way. They are not multiplied by 1 / density:
    with error feedback nothing is lost that would have to be made up for.

    Args:
        density: fraction of the elements that travels, in (0, 1].
        seed: another one draws other positions.
        density_schedule, schedule_unit, dense_below_numel: as in `TopK`.

    Raises:
        ValueError: an argument is none of these.
    """

    collective: ClassVar[Literal["all_reduce", "all_gather"]] = "all_reduce"

    density: float
    seed: int = 0
    density_schedule: Schedule | None = None
    schedule_unit: Unit = "epoch"
    dense_below_numel: int = 4096

    def __post_init__(self) -> None:
        schedule = checked_schedule("RandomK", self.density_schedule, self.schedule_unit)
        object.__setattr__(self, "density_schedule", schedule)
        object.__setattr__(self, "density", checked_density("`RandomK(density=...)`", self.density))
        require_count("`RandomK(seed=...)`", self.seed)
        require_count("`RandomK(dense_below_numel=...)`", self.dense_below_numel)

    @property
    def settled_density(self) -> float:
        return self.density

    @property
    def asks_a_function(self) -> bool:
        return callable(self.density_schedule)

    def density_at(self, epoch: int, step: int) -> float:
        return scheduled_density(
            self.density_schedule, self.schedule_unit, epoch=epoch, step=step, after=self.density
        )

    def positions(self, numel: int, moment: Moment) -> Tensor:
        """The positions, (k,), that travel of `numel` elements at `moment`, all distinct.

        One is drawn from each of k equal parts, and all are shifted by the same distance around
        the end, so that every element has the same chance, k / numel. Much faster than a
        permutation of all.
        """
        k = selected(numel, moment.density)
        generator = np.random.default_rng((self.seed, moment.step, numel))
        bounds = np.arange(k + 1) * numel // k  # (k + 1,)
        drawn = bounds[:-1] + (generator.random(k) * np.diff(bounds)).astype(np.int64)
        return torch.from_numpy((drawn + generator.integers(numel)) % numel)

    def encode(self, buffer: Tensor, moment: Moment) -> Wire:
        """Return the values, (k,); the first is NaN if anything in `buffer` is not finite."""
        values = buffer[self._positions_in(buffer, moment)]
        lowest, highest = torch.aminmax(buffer)
        is_finite = lowest.isfinite() & highest.isfinite()
        values[0] = torch.where(is_finite, values[0], torch.nan)  # without waiting for the device
        return (values,)

    def decode(self, wire: Wire, total: Tensor, moment: Moment, weight: float = 1.0) -> None:
        total.index_add_(0, self._positions_in(total, moment), wire[0], alpha=weight)

    def mask(self, buffer: Tensor, wire: Wire, moment: Moment) -> None:
        buffer.index_fill_(0, self._positions_in(buffer, moment), 0)

    def wire_nbytes(
        self, numel: ArrayLike, itemsize: ArrayLike, density: float = 1.0
    ) -> NDArray[np.float64]:
        return selected(np.asarray(numel, dtype=np.float64), density) * np.asarray(itemsize)

    def _positions_in(self, buffer: Tensor, moment: Moment) -> Tensor:
        return self.positions(buffer.numel(), moment).to(buffer.device)
