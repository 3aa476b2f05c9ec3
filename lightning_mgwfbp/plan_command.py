"""Plan the merge groups of a saved profile for a given link, and predict how each plan does.

Prints, per planner, the groups as [start, stop) index pairs into the profile's layers and, in
seconds since backward began, when communication ends, how much of it is exposed after backward, and
an end that no plan undercuts.
"""

import argparse
import json
import sys
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    DenseCost,
    MergePlan,
    ModelProfile,
    Planner,
    Threshold,
    Timeline,
    resolve_planner,
    simulate,
)

_SECONDS = ("communication_end_seconds", "exposed_seconds", "lower_bound_seconds")


@dataclass(frozen=True)
class Prediction:
    """A plan and what it is predicted to do."""

    plan: MergePlan
    timeline: Timeline

    def to_fields(self) -> dict[str, object]:
        """The groups and the three times, as they are printed."""
        seconds = {key: getattr(self.timeline, key) for key in _SECONDS}
        return {"groups": self.plan.groups, **seconds}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("profile", metavar="PROFILE.json", help="a saved ModelProfile")
    parser.add_argument(
        "--alpha", type=float, required=True, metavar="SECONDS", help="start-up of one message"
    )
    parser.add_argument(
        "--beta", type=float, required=True, metavar="SECONDS_PER_BYTE", help="inverse bandwidth"
    )
    parser.add_argument(
        "--planner",
        choices=("auto", "all", *PLANNERS),
        default="auto",
        metavar="NAME",
        help=f"one of {', '.join(PLANNERS)}; all; or auto, which is optimal (default)",
    )
    parser.add_argument(
        "--threshold-nbytes", type=int, metavar="N", help="group size of the planner threshold"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one object whose keys are the planners' names",
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions; ValueError or OSError for bad input."""
    planners = _planners(arguments.planner, arguments.threshold_nbytes)
    cost = DenseCost(AlphaBeta(arguments.alpha, arguments.beta))
    profile = ModelProfile.load(arguments.profile)
    predictions = {}
    for planner in planners:
        plan = planner.plan(profile, cost)
        predictions[planner.name] = Prediction(plan, simulate(profile, plan, cost))
    if arguments.json:
        print(json.dumps({name: each.to_fields() for name, each in predictions.items()}))
    else:
        _print_table(profile, predictions)


def _planners(name: str, threshold_nbytes: int | None) -> list[Planner]:
    chosen = list(PLANNERS.values()) if name == "all" else [resolve_planner(name)]
    if threshold_nbytes is None:
        return chosen
    threshold = Threshold(threshold_nbytes)
    if threshold.name not in {planner.name for planner in chosen}:
        print(f"--threshold-nbytes has no effect on --planner {name}", file=sys.stderr)
    return [threshold if planner.name == threshold.name else planner for planner in chosen]


def _print_table(profile: ModelProfile, predictions: dict[str, Prediction]) -> None:
    console = Console(markup=False, highlight=False)
    console.print(
        f"{profile.model}: {len(profile.layers)} gradients, {profile.nbytes.sum():,} bytes, "
        f"backward takes {profile.backward_seconds:.6g} seconds"
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("planner", no_wrap=True)
    for column in ("groups", *_SECONDS):
        table.add_column(column, justify="right", no_wrap=True)
    for name, prediction in predictions.items():
        seconds = (getattr(prediction.timeline, key) for key in _SECONDS)
        table.add_row(name, str(len(prediction.plan.groups)), *(f"{each:.6g}" for each in seconds))
    console.print(table)
    for name, prediction in predictions.items():
        groups = " ".join(f"[{start}, {stop})" for start, stop in prediction.plan.groups)
        console.print(f"{name}: {groups}", soft_wrap=True)
