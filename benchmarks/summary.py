"""From step times to the figures of the table: medians, spread, and ratios paired by round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Blocks = Sequence[Sequence[float]]  # seconds, [round][step]


@dataclass(frozen=True)
class Summary:
    """One contender's figures; a ratio is None where its denominator did not run.

    Args:
        median_seconds: over the steps of all rounds.
        spread_seconds: interquartile range of the same steps.
        ratio_to_ddp, ratio_to_compute: the median over the rounds of the ratio of the two
            contenders' medians in that round. Blocks of one round ran within seconds of each other,
            so that whatever else the machine did in the course of the run cancels.
    """

    median_seconds: float
    spread_seconds: float
    ratio_to_ddp: float | None
    ratio_to_compute: float | None


def summarise(blocks: Mapping[str, Blocks]) -> dict[str, Summary]:
    """The figures of each contender, from `blocks[contender][round][step]` in seconds."""
    return {
        name: Summary(
            median_seconds=float(np.median(rounds)),
            spread_seconds=float(np.subtract(*np.percentile(rounds, [75, 25]))),
            ratio_to_ddp=paired_ratio(rounds, blocks.get("ddp")),
            ratio_to_compute=paired_ratio(rounds, blocks.get("compute")),
        )
        for name, rounds in blocks.items()
    }


def paired_ratio(rounds: Blocks, reference: Blocks | None) -> float | None:
    """Median over the rounds of median(rounds[i]) / median(reference[i])."""
    if reference is None:
        return None
    return float(np.median(np.median(rounds, axis=1) / np.median(reference, axis=1)))
