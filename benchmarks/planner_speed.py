"""How long the planners take, on one core: `python benchmarks/planner_speed.py`.

Targets for `optimal`: 1,000 layers in 50 ms and 10,000 layers in 3 s, whatever the link. Real
profiles and drawn ones (sizes over four decades) meet links whose total wire time is a tenth of
backward's, about the same, and four times as much.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from statistics import median
from time import process_time

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    DenseCost,
    LayerProfile,
    ModelProfile,
    Planner,
)

REAL_PROFILES = Path(__file__).parent.parent / "tests" / "data" / "profiles"
REPEATS = 5
WIRE_TO_BACKWARD = (0.1, 1.0, 4.0)
ALPHA = 1e-4


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


def planning_seconds(planner: Planner, profile: ModelProfile, cost: DenseCost) -> float:
    """Median CPU seconds of one plan."""
    samples = []
    for _ in range(REPEATS):
        begin = process_time()
        planner.plan(profile, cost)
        samples.append(process_time() - begin)
    return median(samples)


def main() -> None:
    profiles = [ModelProfile.load(path) for path in sorted(REAL_PROFILES.glob("*.json"))]
    profiles += [drawn_profile(layers) for layers in (1_000, 10_000)]
    table = Table(title=f"CPU milliseconds to plan, median of {REPEATS}", box=box.SIMPLE_HEAD)
    for column in ("profile", "layers", "wire/bwd", *PLANNERS):
        table.add_column(column, justify="left" if column == "profile" else "right", no_wrap=True)
    for profile in profiles:
        for ratio in WIRE_TO_BACKWARD:
            beta = ratio * profile.backward_seconds / float(profile.nbytes.sum())
            cost = DenseCost(AlphaBeta(ALPHA, beta))
            milliseconds = (
                f"{planning_seconds(planner, profile, cost) * 1e3:.1f}"
                for planner in PLANNERS.values()
            )
            table.add_row(profile.model, str(len(profile.layers)), f"{ratio:g}", *milliseconds)
    Console().print(table)


if __name__ == "__main__":
    main()
