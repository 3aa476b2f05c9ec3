"""How long the planners take, on one core: `python benchmarks/planner_speed.py`.

Targets for `optimal`: 1,000 layers in 50 ms and 10,000 layers in 3 s, whatever the link. Real
profiles and drawn ones (sizes over four decades) meet links whose total wire time is a tenth of
backward's, about the same, and four times as much.

Where groups are selected before they are sent, `optimal` is another search: its target is 500
layers in 1 s. There each row is the slowest of several densities and of links of 0.1, 1 and 10
Gbit/s between 16 ranks. It is missed where both clocks are busy all the time, so that hundreds of
groups trade one for the other: with the fastest of the sorts at a density of 0.003 and 1 Gbit/s.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as Printed

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    Cost,
    DenseCost,
    LayerProfile,
    ModelProfile,
    Planner,
    SortSelection,
    SparseCost,
    Table,
    TopKPairs,
    all_gather_link,
)

REAL_PROFILES = Path(__file__).parent.parent / "tests" / "data" / "profiles"
REPEATS = 5
WIRE_TO_BACKWARD = (0.1, 1.0, 4.0)
ALPHA = 1e-4
DENSITIES = (0.001, 0.003, 0.01, 0.1)
SECONDS_PER_BYTE = (8e-8, 8e-9, 8e-10)
SELECTIONS = {
    "sort, 3e-11": SortSelection(3e-11),
    "sort, 1e-10": SortSelection(1e-10),
    "sort, 2e-9": SortSelection(2e-9),
    "scan": Table(((0, 1e-5), (1e4, 2.5e-5), (1e6, 2e-4), (1e8, 0.015))),
}
RANKS = 16


def drawn_profile(layers: int) -> ModelProfile:
    generator = np.random.default_rng(layers)
    numels = (10 ** generator.uniform(2, 6, layers)).astype(int).tolist()
    seconds = generator.exponential(0.25 / layers, layers).tolist()
    return ModelProfile(
        f"drawn {layers}",
        tuple(
            LayerProfile(f"p{index}", numel, "float32", duration)
            for index, (numel, duration) in enumerate(zip(numels, seconds, strict=True))
        ),
        forward_seconds=0.1,
    )


def planning_seconds(planner: Planner, profile: ModelProfile, cost: Cost) -> float:
    """Median CPU seconds of one plan."""
    samples = []
    for _ in range(REPEATS):
        begin = process_time()
        planner.plan(profile, cost)
        samples.append(process_time() - begin)
    return median(samples)


def dense_exchanges(profile: ModelProfile) -> dict[str, list[Cost]]:
    betas = {
        ratio: ratio * profile.backward_seconds / float(profile.nbytes.sum())
        for ratio in WIRE_TO_BACKWARD
    }
    return {
        f"wire/bwd {ratio:g}": [DenseCost(AlphaBeta(ALPHA, beta))] for ratio, beta in betas.items()
    }


def sparse_exchanges() -> dict[str, list[Cost]]:
    return {
        name: [
            SparseCost(all_gather_link(ALPHA / 2, beta, RANKS), selection, TopKPairs(density))
            for density, beta in product(DENSITIES, SECONDS_PER_BYTE)
        ]
        for name, selection in SELECTIONS.items()
    }


def print_table(title: str, rows: Iterable[tuple[ModelProfile, dict[str, list[Cost]]]]) -> None:
    table = Printed(
        title=f"{title}: CPU milliseconds to plan, median of {REPEATS}", box=SIMPLE_HEAD
    )
    for column in ("profile", "exchange"):
        table.add_column(column, no_wrap=True)
    for column in ("layers", *PLANNERS):
        table.add_column(column, justify="right", no_wrap=True)
    for profile, exchanges in rows:
        for name, costs in exchanges.items():
            milliseconds = (
                f"{max(planning_seconds(planner, profile, cost) for cost in costs) * 1e3:.1f}"
                for planner in PLANNERS.values()
            )
            table.add_row(profile.model, name, str(len(profile.layers)), *milliseconds)
    Console().print(table)


def main() -> None:
    real = [ModelProfile.load(path) for path in sorted(REAL_PROFILES.glob("*.json"))]
    large = [drawn_profile(layers) for layers in (1_000, 10_000)]
    print_table("dense", ((each, dense_exchanges(each)) for each in (*real, *large)))
    print_table("sparse", ((each, sparse_exchanges()) for each in (*real, drawn_profile(500))))


if __name__ == "__main__":
    main()
