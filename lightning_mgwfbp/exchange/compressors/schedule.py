"""Densities, fixed or changing in the course of training.

Deep Gradient Compression (Lin et al., ICLR'18, section 3.3) warms up with 0.25, 0.0625, 0.015625,
0.004 and 0.001, one for each epoch.
"""

from __future__ import annotations

import inspect
import pkgutil
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

Schedule = Sequence[float] | Callable[[int], float] | str
Unit = Literal["epoch", "step"]


@dataclass(frozen=True, repr=False)
class DensityFunction:
    """A user's function from epoch or step to density, held to what a density must be.

    Ranks compare options by their text, so it reads as its qualified name, without an address.

    Args:
        argument: what errors call it.
        function: the user's.
    """

    argument: str
    function: Callable[[int], float]

    def __call__(self, at: int) -> float:
        return checked_density(f"{self.argument} at {at}", self.function(at))

    def __repr__(self) -> str:
        named = self.function if inspect.isroutine(self.function) else type(self.function)
        return f"{named.__module__}.{named.__qualname__}"


def checked_density(argument: str, density: object, *, choices: str = "in (0, 1]") -> float:
    """Return `density`, the fraction of elements that travels.

    Raises:
        ValueError: it is not a number in (0, 1].
    """
    if isinstance(density, Real) and not isinstance(density, bool) and 0 < float(density) <= 1:
        return float(density)
    raise ValueError(
        f"{argument} must be {choices}, got {density!r:.60}."
        " It is the fraction of elements that travels: 0.01 sends one in a hundred."
    )


def checked_schedule(compressor: str, schedule: Schedule | None, unit: Unit) -> Schedule | None:
    """Return `schedule` as a value that can be compared and hashed.

    Args:
        compressor: the name of its class, for errors.
        schedule: a density for each epoch or step, a function of it or the path of one (as a
            YAML file has it: package.module.function), or None.
        unit: what it goes by.

    Raises:
        ValueError: it is none of these, or has a density outside (0, 1].
    """
    argument = f"`{compressor}(density_schedule=...)`"
    if unit not in ("epoch", "step"):
        raise ValueError(
            f"`{compressor}(schedule_unit=...)` must be 'epoch' or 'step', got {unit!r}."
        )
    if schedule is None:
        if unit != "epoch":
            warnings.warn(
                f"`{compressor}(schedule_unit={unit!r})` has no effect without `density_schedule`.",
                stacklevel=4,
            )
        return None
    if isinstance(schedule, str):
        schedule = _imported(argument, schedule)
    if callable(schedule):
        is_checked = isinstance(schedule, DensityFunction)
        return schedule if is_checked else DensityFunction(argument, schedule)
    if not isinstance(schedule, Sequence) or not schedule:
        raise ValueError(
            f"{argument} must be one density or more, such as [0.25, 0.0625, 0.015625, 0.004], or"
            f" a function from {unit} to density, got {schedule!r:.60}."
        )
    return tuple(
        checked_density(f"{argument} entry {n}", density) for n, density in enumerate(schedule)
    )


def _imported(argument: str, path: str) -> Callable[[int], float]:
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{argument} names no function: {path!r}: {error}.") from error
    if not callable(function):
        raise ValueError(f"{argument} must name a function, got {path!r}, a {type(function)}.")
    return function


def scheduled_density(
    schedule: Schedule | None, unit: Unit, *, epoch: int, step: int, after: float
) -> float:
    """The density of a checked `schedule` then; `after` where it has ended or there is none."""
    at = epoch if unit == "epoch" else step
    if callable(schedule):
        return schedule(at)
    assert not isinstance(schedule, str)  # checked schedules hold functions
    return after if schedule is None or at >= len(schedule) else schedule[at]
