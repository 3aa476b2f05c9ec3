"""Does training with sparse gradients end where dense training ends? The examples, on two ranks.

    python -m benchmarks.convergence digits --seeds 10
    python -m benchmarks.convergence gpt --seeds 1

runs configs/digits.yaml (gpt.yaml) and configs/digits_topk.yaml (gpt_topk.yaml) with the same seeds
and as many steps, prints a table, and draws the curves to docs/convergence_TASK.png.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import matplotlib.pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.processes import run_on_loopback
from lightning_mgwfbp.cli import lightning_cli

ROOT = Path(__file__).parent.parent
WORLD_SIZE = 2
QUIET = (
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_model_summary=false",
)


@dataclass(frozen=True)
class Task:
    """What is compared: a metric along training, and one at its end."""

    metric: str
    evaluate: str  # the Trainer's method for the end
    result: str
    what: str
    options: tuple[str, ...] = ()  # of the command line, in the place of the configs'


TASKS = {
    "digits": Task("val_acc", "test", "test_acc", "accuracy"),
    "gpt": Task(
        "val_loss",
        "validate",
        "val_loss",
        "validation loss, nats per byte",
        (
            "--trainer.max_steps=1500",
            "--trainer.val_check_interval=100",
            "--model.init_args.layers=4",
            "--model.init_args.width=192",
            "--model.init_args.learning_rate=0.001",
            "--model.init_args.beta2=0.999",
        ),
    ),
}
FORMS = {"dense": "", "sparse": "_topk"}  # suffix of the config

Curve = list[tuple[int, float]]  # (step, metric)


class Recorder(pl.Callback):
    """Notes a metric after each validation."""

    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.curve: Curve = []

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            value = float(trainer.callback_metrics[self.metric])
            self.curve.append((trainer.global_step, value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seeds", type=int, default=10, help="how many (default: 10)")
    parser.add_argument("--out", type=Path, help="of the figure (default: in docs/)")
    parser.add_argument("--rank-of", choices=FORMS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        print(json.dumps(train(arguments.task, arguments.rank_of, arguments.seeds)))
        return
    runs = {form: run_ranks(arguments.task, form, arguments.seeds) for form in FORMS}
    report(TASKS[arguments.task], runs)
    out = arguments.out or ROOT / "docs" / f"convergence_{arguments.task}.png"
    draw(TASKS[arguments.task], runs, out)


def run_ranks(task: str, form: str, seeds: int) -> list[dict[str, Any]]:
    """Train in `form` with each seed; curve and result of each, from rank 0."""
    command = [sys.executable, "-m", "benchmarks.convergence", task, "--seeds", str(seeds)]
    outputs = run_on_loopback([[*command, "--rank-of", form]] * WORLD_SIZE)
    measured: list[dict[str, Any]] = json.loads(outputs[0].splitlines()[-1])
    return measured


def train(task: str, form: str, seeds: int) -> list[dict[str, Any]]:
    """As one rank of several: fit and evaluate once for each seed."""
    config = ROOT / "configs" / f"{task}{FORMS[form]}.yaml"
    options = (*QUIET, *TASKS[task].options)
    measured = []
    for seed in range(seeds):
        recorder = Recorder(TASKS[task].metric)
        cli = lightning_cli(
            ["fit", f"--config={config}", f"--seed_everything={seed}", *options],
            save_config_callback=None,
            trainer_defaults={"callbacks": [recorder]},
        )
        evaluate = getattr(cli.trainer, TASKS[task].evaluate)
        (metrics,) = evaluate(cli.model, cli.datamodule, verbose=False)
        measured.append({"curve": recorder.curve, "result": metrics[TASKS[task].result]})
    return measured


def report(task: Task, runs: dict[str, list[dict[str, Any]]]) -> None:
    """Print each seed's results, and their means."""
    table = Table(
        "seed", *runs, "difference", "ratio", title=f"{task.result} on {WORLD_SIZE} ranks"
    )
    results = {form: [run["result"] for run in each] for form, each in runs.items()}
    dense, sparse = results["dense"], results["sparse"]
    for seed, (d, s) in enumerate(zip(dense, sparse, strict=True)):
        table.add_row(str(seed), *cells(d, s))
    table.add_row("mean", *cells(statistics.mean(dense), statistics.mean(sparse)))
    Console().print(table)


def cells(dense: float, sparse: float) -> Sequence[str]:
    return (f"{dense:.4f}", f"{sparse:.4f}", f"{sparse - dense:+.4f}", f"{sparse / dense:.4f}")


def draw(task: Task, runs: dict[str, list[dict[str, Any]]], out: Path) -> None:
    """One line per seed, and the mean over seeds."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for color, (form, each) in zip(("tab:blue", "tab:orange"), runs.items(), strict=True):
        curves = [run["curve"] for run in each]
        steps = [step for step, _ in curves[0]]
        values = [[value for _, value in curve] for curve in curves]
        for curve in values if len(values) > 1 else ():
            axes.plot(steps, curve, color=color, linewidth=0.5, alpha=0.4)
        means = [statistics.mean(at) for at in zip(*values, strict=True)]
        axes.plot(steps, means, color=color, label=form, marker="o", markersize=3)
    axes.set_xlabel("optimizer steps")
    axes.set_ylabel(task.what)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(out, dpi=150)


if __name__ == "__main__":
    main()
