"""Plan the merge groups of a saved profile for a given link, and predict how each plan does.

The link is given by --alpha and --beta where gradients travel whole, by an all-reduce. With
--density they are selected first and then all-gathered: the k = max(1, round(density * n)) largest
of a group's n elements, which takes select * n * log2 n seconds of computation and, for P ranks,
(P - 1) * (gather_alpha + gather_beta * bytes) seconds on the link, each value with an index of 4
bytes.

Prints, per planner, the groups as [start, stop) index pairs into the profile's layers and, in
seconds since backward began, when communication ends, how much of it is exposed after backward, and
an end that no plan undercuts.

With --schedule cross_iteration each all-reduce is cut into its halves, half the seconds each, and
all-gathers may hide behind the next forward too. What counts is then the iteration, from the
beginning of backward to the end of the next forward. Beside it stand an iteration that no plan
undercuts, how much communication adds to computation, and the iteration of the planner's own plan
without that schedule. The JSON output also has, per group, how many pieces each half is cut into,
and the order in which groups are all-gathered.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    Cost,
    DenseCost,
    HalvesCost,
    MergePlan,
    ModelProfile,
    Planner,
    SortSelection,
    SparseCost,
    Threshold,
    TopKPairs,
    all_gather_link,
    plan_cross_iteration,
    resolve_planner,
    simulate,
    simulate_cross_iteration,
)
from lightning_mgwfbp.plan.records import counted, require_count, require_density, require_number

_DENSE = ("alpha", "beta")
_SPARSE = ("density", "select", "world_size", "gather_alpha", "gather_beta")
_SCHEDULES = ("backward", "cross_iteration")
_HALVES = ("pieces", "gather_order")  # what a plan has of the latter alone


@dataclass(frozen=True)
class Prediction:
    """A plan and what it is predicted to do, by the names of the columns."""

    plan: MergePlan
    seconds: dict[str, float]

    def to_fields(self) -> dict[str, object]:
        """The plan and its times, as they are printed."""
        halves = {key: getattr(self.plan, key) for key in _HALVES if getattr(self.plan, key)}
        return {"groups": self.plan.groups, **halves, **self.seconds}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "profile",
        metavar="PROFILE.json",
        help="a saved ModelProfile, such as WarmupCallback(save_dir=...) writes",
    )
    parser.add_argument(
        "--alpha", type=float, metavar="SECONDS", help="start-up of one message; bench fits both"
    )
    parser.add_argument("--beta", type=float, metavar="SECONDS_PER_BYTE", help="inverse bandwidth")
    _add_sparse_arguments(parser)
    parser.add_argument(
        "--schedule",
        choices=_SCHEDULES,
        default="backward",
        help="whether all-gathers may hide behind the next forward too (default: %(default)s)",
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


def _add_sparse_arguments(parser: argparse.ArgumentParser) -> None:
    sparse = parser.add_argument_group("sparse exchange", "all five, instead of --alpha and --beta")
    sparse.add_argument(
        "--density", type=float, metavar="FRACTION", help="of the elements that travels"
    )
    sparse.add_argument(
        "--select", type=float, metavar="SECONDS", help="of selection, per n * log2 n elements"
    )
    sparse.add_argument("--world-size", type=int, metavar="P", help="ranks")
    sparse.add_argument(
        "--gather-alpha", type=float, metavar="SECONDS", help="start-up of one hop of an all-gather"
    )
    sparse.add_argument(
        "--gather-beta", type=float, metavar="SECONDS_PER_BYTE", help="of one hop of an all-gather"
    )


def run(arguments: argparse.Namespace) -> None:
    """Print the predictions; ValueError or OSError for bad input."""
    planners = _planners(arguments.planner, arguments.threshold_nbytes)
    profile = _profile(arguments.profile)
    if arguments.schedule == "cross_iteration":
        link = _link_of_halves(arguments)
        predictions = [_predict_cross_iteration(profile, planner, link) for planner in planners]
    else:
        cost = _cost(arguments)
        predictions = [_predict(profile, planner, cost) for planner in planners]
    if arguments.json:
        print(json.dumps({each.plan.planner: each.to_fields() for each in predictions}))
    else:
        _print_table(profile, predictions)


def _profile(path: str) -> ModelProfile:
    try:
        return ModelProfile.load(path)
    except FileNotFoundError:
        raise ValueError(
            f"there is no file {path}; give the profile.json that a training saves under"
            " Trainer(callbacks=[WarmupCallback(save_dir=...)])"
        ) from None


def _predict(profile: ModelProfile, planner: Planner, cost: Cost) -> Prediction:
    plan = planner.plan(profile, cost)
    timeline = simulate(profile, plan, cost)
    columns = ("communication_end_seconds", "exposed_seconds", "lower_bound_seconds")
    return Prediction(plan, {key: getattr(timeline, key) for key in columns})


def _predict_cross_iteration(
    profile: ModelProfile, planner: Planner, link: AlphaBeta
) -> Prediction:
    halves = HalvesCost.of_all_reduce(link)
    plan = plan_cross_iteration(profile, halves, planner)
    timeline = simulate_cross_iteration(profile, plan, halves)
    columns = ("iteration_seconds", "exposed_seconds", "lower_bound_seconds")
    seconds = {key: getattr(timeline, key) for key in columns}
    whole = _predict(profile, planner, DenseCost(link)).seconds["communication_end_seconds"]
    return Prediction(
        plan, {**seconds, "backward_schedule_seconds": whole + profile.forward_seconds}
    )


def _link_of_halves(arguments: argparse.Namespace) -> AlphaBeta:
    if idle := _given(arguments, _SPARSE):
        raise ValueError(
            f"{_options(idle)} cannot go with --schedule cross_iteration, where gradients travel "
            f"whole: leave {_them(idle)} out, or give --schedule backward"
        )
    _require(arguments, _DENSE, "with --schedule cross_iteration")
    return AlphaBeta(arguments.alpha, arguments.beta)


def _cost(arguments: argparse.Namespace) -> Cost:
    if not _given(arguments, _SPARSE):
        _require(arguments, _DENSE, "without --density")
        return DenseCost(AlphaBeta(arguments.alpha, arguments.beta))
    _require(arguments, _SPARSE, "of a sparse exchange")
    if idle := _given(arguments, _DENSE):
        raise ValueError(
            f"{_options(idle)} would have no effect with --density: leave {_them(idle)} out"
        )
    require_density("--density", arguments.density)
    for name in ("select", "gather_alpha", "gather_beta"):
        require_number(_options([name]), getattr(arguments, name))
    require_count("--world-size", arguments.world_size, least=2)
    return SparseCost(
        all_gather_link(arguments.gather_alpha, arguments.gather_beta, arguments.world_size),
        SortSelection(arguments.select),
        TopKPairs(arguments.density),
        least_itemsize=1,
    )


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(arguments, name) is not None]


def _require(arguments: argparse.Namespace, names: Sequence[str], when: str) -> None:
    given = _given(arguments, names)
    if lacking := [name for name in names if name not in given]:
        raise ValueError(f"the following arguments are required {when}: {_options(lacking)}")


def _options(names: Sequence[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def _them(names: Sequence[str]) -> str:
    return "it" if len(names) == 1 else "them"


def _planners(name: str, threshold_nbytes: int | None) -> list[Planner]:
    chosen = list(PLANNERS.values()) if name == "all" else [resolve_planner(name)]
    if threshold_nbytes is None:
        return chosen
    threshold = Threshold(threshold_nbytes)
    if threshold.name not in {planner.name for planner in chosen}:
        print(f"--threshold-nbytes has no effect on --planner {name}", file=sys.stderr)
    return [threshold if planner.name == threshold.name else planner for planner in chosen]


def _print_table(profile: ModelProfile, predictions: Sequence[Prediction]) -> None:
    console = Console(markup=False, highlight=False)
    console.print(
        f"{profile.model}: {counted(len(profile.layers), 'gradient')}, "
        f"{counted(profile.nbytes.sum(), 'byte')}, "
        f"backward takes {profile.backward_seconds:.6g} seconds, "
        f"forward {profile.forward_seconds:.6g}; all in seconds:",
        soft_wrap=True,
    )
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("planner", no_wrap=True)
    for column in ("groups", *predictions[0].seconds):
        table.add_column(column.removesuffix("_seconds"), justify="right", no_wrap=True)
    for prediction in predictions:
        seconds = (f"{each:.6g}" for each in prediction.seconds.values())
        table.add_row(prediction.plan.planner, str(len(prediction.plan.groups)), *seconds)
    console.print(table)
    for prediction in predictions:
        groups = " ".join(f"[{start}, {stop})" for start, stop in prediction.plan.groups)
        console.print(f"{prediction.plan.planner}: {groups}", soft_wrap=True)
