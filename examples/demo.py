"""The main job, shown: digits trained under "mgwfbp" and under "ddp", from configs/digits.yaml.

    make demo        (or, from the repository root:  python examples/demo.py)

Ends with a table of what was measured, planned and reached, and asserts that the test accuracy is
at least 97 % and that both strategies end with the same weights, bit for bit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_mgwfbp import MGWFBPStrategy
from lightning_mgwfbp.cli import lightning_cli

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for `examples.digits`, wherever this is started from
LEAST_ACCURACY = 0.97


def train(strategy: str) -> tuple[float, dict[str, Tensor], object]:
    """Train and test on two processes; return test accuracy, weights, and the strategy."""
    say(f"==> Training the digits on two processes with strategy {strategy!r}")
    cli = lightning_cli(
        [
            "fit",
            f"--config={ROOT / 'configs' / 'digits.yaml'}",
            f"--trainer.strategy={strategy}",
            "--trainer.logger=false",
            "--trainer.enable_checkpointing=false",
            "--trainer.enable_model_summary=false",
        ],
        save_config_callback=None,
    )
    (metrics,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    return metrics["test_acc"], cli.model.state_dict(), cli.trainer.strategy


@rank_zero_only
def say(text: str) -> None:
    print(text, flush=True)


@rank_zero_only
def show(strategy: MGWFBPStrategy, accuracy: float, ddp_accuracy: float, same: bool) -> None:
    tuned = strategy.tuned
    assert tuned is not None
    assert strategy.measured_exposed_seconds is not None
    table = Table("", "mgwfbp", title="Handwritten digits, 2 processes")
    table.caption = "measured includes waiting for the slower process, and for a core to be free"
    table.add_row("merge groups", str(len(tuned.plan.groups)))
    table.add_row("alpha: one more message costs", f"{tuned.link.alpha * 1e6:.0f} us")
    table.add_row("beta: one more megabyte costs", f"{tuned.link.beta * 1e9:.2f} ms")
    table.add_row("exposed, predicted", f"{tuned.timeline.exposed_seconds * 1e3:.2f} ms per step")
    table.add_row("exposed, measured", f"{strategy.measured_exposed_seconds * 1e3:.2f} ms per step")
    table.add_row("test accuracy", f"{accuracy:.2%} (ddp: {ddp_accuracy:.2%})")
    table.add_row("weights", "equal to ddp's, bit for bit" if same else "NOT EQUAL to ddp's")
    Console().print(table)


def main() -> None:
    accuracy, weights, strategy = train("mgwfbp")
    ddp_accuracy, ddp_weights, _ = train("ddp")
    assert isinstance(strategy, MGWFBPStrategy)
    same = all(torch.equal(value, ddp_weights[name]) for name, value in weights.items())
    show(strategy, accuracy, ddp_accuracy, same)
    assert accuracy >= LEAST_ACCURACY, f"test accuracy {accuracy:.4f} below {LEAST_ACCURACY}"
    assert same, "weights differ from those that strategy 'ddp' reaches"


if __name__ == "__main__":
    main()
