"""Fit `t(m) = alpha + beta * m` to measured collectives, so that outliers do not matter.

Minimises the sum of absolute *relative* errors, `sum |t_i - alpha - beta m_i| / s_i`, with alpha
and beta at least 0: relative, because sizes span eight decades and latency shows only in the small
ones; absolute, because a line that passes through the majority is not bent by the rest. The scale
`s_i` is the median time of the neighbouring sizes: by its own time a lucky small message, ten times
as fast as its like, would count ten times as much. Solved by iteratively reweighted least squares
(Schlossmacher, JASA 1973).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_mgwfbp.plan.costs import AlphaBeta
from lightning_mgwfbp.plan.records import require_number

_ITERATIONS = 100
_SMALLEST_RELATIVE_ERROR = 1e-6  # weights stay finite where the line meets a sample


@dataclass(frozen=True)
class LinkFit:
    """A fitted link, and how well it describes the `(nbytes, seconds)` samples."""

    link: AlphaBeta
    r_squared: float
    residuals: tuple[float, ...]
    """Measured minus fitted seconds, one per sample."""
    samples: tuple[tuple[float, float], ...]


def fit_alpha_beta(samples: Sequence[tuple[float, float]]) -> LinkFit:
    """Fit a link to `(nbytes, seconds)` samples, of which a minority may be grossly wrong.

    ValueError if a size or a time is not a finite number at least 0 (times above 0), or if there
    are not two different sizes, since latency and bandwidth then cannot be told apart.
    """
    for size, duration in samples:
        require_number("samples", size, "bytes")
        require_number("samples", duration)
        if duration == 0:
            raise ValueError("samples must take time, got 0 seconds: repeat until the clock ticks")
    if len({size for size, _ in samples}) < 2:
        raise ValueError(f"samples must cover at least two sizes, got {list(samples)!r:.80}")
    nbytes, seconds = np.array(samples, dtype=np.float64).T
    scale = _neighbouring_median(nbytes, seconds)
    weights = scale**-2
    for _ in range(_ITERATIONS):
        alpha, beta = _least_squares(nbytes, seconds, weights)
        relative = np.abs(seconds - alpha - beta * nbytes) / scale
        weights = scale**-2 / np.maximum(relative, _SMALLEST_RELATIVE_ERROR)
    residuals = seconds - alpha - beta * nbytes
    spread = float(np.sum((seconds - seconds.mean()) ** 2))
    return LinkFit(
        link=AlphaBeta(alpha, beta),
        r_squared=1 - float(np.sum(residuals**2)) / spread if spread else 1.0,
        residuals=tuple(residuals.tolist()),
        samples=tuple((float(size), float(duration)) for size, duration in samples),
    )


def _neighbouring_median(
    nbytes: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Median over each sample and the two on either side of it, by size."""
    order = np.argsort(nbytes, kind="stable")
    mirrored = np.pad(seconds[order], 2, mode="symmetric")
    medians = np.empty_like(seconds)
    medians[order] = np.median(np.lib.stride_tricks.sliding_window_view(mirrored, 5), axis=1)
    return medians


def _least_squares(
    nbytes: NDArray[np.float64], seconds: NDArray[np.float64], weights: NDArray[np.float64]
) -> tuple[float, float]:
    """Weighted least squares for alpha and beta, neither below 0."""
    mean_nbytes = np.average(nbytes, weights=weights)
    mean_seconds = np.average(seconds, weights=weights)
    deviation = weights * (nbytes - mean_nbytes)
    beta = deviation @ (seconds - mean_seconds) / (deviation @ (nbytes - mean_nbytes))
    alpha = mean_seconds - beta * mean_nbytes
    if beta < 0:
        return float(mean_seconds), 0.0
    if alpha < 0:
        return 0.0, float((weights * nbytes) @ seconds / ((weights * nbytes) @ nbytes))
    return float(alpha), float(beta)
