"""Compare ways to exchange gradients: contenders in turn, A B A B, on two hosts of this machine.

    python benchmarks/run.py --models conv,replay:resnet50@0.2 --rate 1gbit --out results.json

README.md beside this file says what is measured and how to read the table.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import models
from benchmarks.contenders import CONTENDERS
from benchmarks.netlab import Lab, check_rate
from benchmarks.processes import run_on_loopback
from benchmarks.summary import summarise

WORLD_SIZE = 2
RSS_STEPS = 5  # after the warm-up: memory has reached its peak

Run = Callable[[Sequence[Sequence[str]]], list[str]]
Figures = dict[str, dict[str, Any]]  # contender to the columns of its row


def main() -> None:
    arguments = parse_arguments()
    # An end by SIGTERM is then an exception too, and takes the hosts down with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    results: dict[str, Figures] = {}
    with hosts(arguments.rate) as run:
        for model in arguments.models:
            console.print(f"{model}: {', '.join(arguments.contenders)} ...", highlight=False)
            figures = compare(run, model, arguments.contenders, arguments.steps, arguments.rounds)
            if arguments.rss:
                add_peak_rss(figures, run, model)
            results[model] = figures
            console.print(table(model, arguments, figures))
            if arguments.out:  # after every model, so that an interrupted run keeps the others
                arguments.out.write_text(json.dumps(report(arguments, results), indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="\n".join(
            ["contenders:", *(f"  {row.name:<12} {row.what}" for row in CONTENDERS.values())]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--models",
        default="conv,gpt,narrow,replay:resnet50@0.2",
        help=f"comma-separated: {', '.join(models.MODELS)}, replay:PROFILE[@SCALE] "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--contenders",
        default=",".join(name for name, row in CONTENDERS.items() if row.horovod is None),
        help="comma-separated rows of contenders.py (default: those without Horovod)",
    )
    parser.add_argument(
        "--rate",
        default="none",
        help="of both hosts' links, as tc writes it: 1gbit, 100mbit (needs root); or none: "
        "two processes on plain loopback (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=10, help="measured in each block")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each contender")
    parser.add_argument(
        "--rss", action="store_true", help="also measure peak memory, in fresh processes"
    )
    parser.add_argument("--out", type=Path, help="write all figures and step times to this JSON")
    arguments = parser.parse_args()
    try:
        check(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return arguments


def check(arguments: argparse.Namespace) -> None:
    """Split the lists in place; ValueError or OSError for what would only fail later, on a rank."""
    # A name given twice counts once.
    arguments.models = list(dict.fromkeys(arguments.models.split(",")))
    arguments.contenders = list(dict.fromkeys(arguments.contenders.split(",")))
    for model in arguments.models:
        models.builder(model)
    for name in arguments.contenders:
        if name not in CONTENDERS:
            raise ValueError(f"`--contenders` takes {', '.join(CONTENDERS)}, got {name!r}.")
        CONTENDERS[name].check()
    if arguments.rate != "none":
        check_rate(arguments.rate)
    for option in ("steps", "rounds"):
        if getattr(arguments, option) < 1:
            raise ValueError(f"`--{option}` must be 1 or more, got {getattr(arguments, option)}.")


@contextmanager
def hosts(rate: str) -> Iterator[Run]:
    """What runs one command per rank: on hosts whose links have `rate`, or all on this one."""
    if rate == "none":
        yield run_on_loopback
    else:
        with Lab(WORLD_SIZE, rate) as lab:
            yield lab.run


def compare(run: Run, model: str, contenders: list[str], steps: int, rounds: int) -> Figures:
    """Each contender's figures on `model`, without peak memory, and with all its step times."""
    measured = run_workers(run, model, contenders, steps, rounds)
    return {
        name: {
            **asdict(summary),
            "merge_groups": measured["merge_groups"][name],
            "peak_rss_bytes": None,
            "blocks": measured["blocks"][name],
        }
        for name, summary in summarise(measured["blocks"]).items()
    }


def add_peak_rss(figures: Figures, run: Run, model: str) -> None:
    """Fill in each contender's peak memory, from fresh processes in which it runs alone."""
    for name, row in figures.items():
        measured = run_workers(run, model, [name], steps=RSS_STEPS, rounds=1)
        row["peak_rss_bytes"] = measured["peak_rss_bytes"]


def run_workers(
    run: Run, model: str, contenders: list[str], steps: int, rounds: int
) -> dict[str, Any]:
    """Run worker.py on all ranks and return what rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "blocks.json")
        command = [sys.executable, "-m", "benchmarks.worker", "--model", model]
        command += ["--contenders", ",".join(contenders)]
        command += ["--steps", str(steps), "--rounds", str(rounds), "--out", str(out)]
        run([command] * WORLD_SIZE)
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured


def table(model: str, arguments: argparse.Namespace, figures: Figures) -> Table:
    """One row per contender; "-" where there is nothing to say."""
    network = "loopback" if arguments.rate == "none" else arguments.rate
    drawn = Table(
        title=f"{model}, {WORLD_SIZE} ranks, {network}: "
        f"{arguments.rounds} rounds of {arguments.steps} steps"
    )
    drawn.add_column("contender")
    for heading in ("groups", "ms/step", "IQR", "/ ddp", "/ compute", "peak MiB"):
        drawn.add_column(heading, justify="right")
    for name, row in figures.items():
        drawn.add_row(
            name,
            cell(row["merge_groups"], "d"),
            cell(row["median_seconds"] * 1e3, ".1f"),
            cell(row["spread_seconds"] * 1e3, ".1f"),
            cell(row["ratio_to_ddp"], ".3f"),
            cell(row["ratio_to_compute"], ".3f"),
            cell(row["peak_rss_bytes"] and row["peak_rss_bytes"] / 2**20, ".0f"),
        )
    return drawn


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def report(arguments: argparse.Namespace, results: dict[str, Figures]) -> dict[str, Any]:
    """The JSON: how it was run, and `results[model][contender]`; times in seconds."""
    return {
        "rate": arguments.rate,
        "world_size": WORLD_SIZE,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "machine": {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "results": results,
    }


if __name__ == "__main__":
    main()
