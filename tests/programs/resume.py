"""Started by tests, again after each fault: fit to the end, going on from the last checkpoint.

python resume.py FOLDER MARKER '{"strategy": {...}, "fault": "kill", "timeout": 6}'

The fault is one of `FAULTS`, in the third epoch; there is only one, as MARKER says from then on.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import lightning.pytorch as pl
import torch
from fit import Line, fit, report
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import nn

from lightning_mgwfbp import AlphaBeta, TopK


class Wide(Line):
    """Large enough to be compressed."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        # by step and rank, so that it goes on alike wherever it is resumed
        generator = torch.Generator().manual_seed(10 * self.global_step + self.global_rank)
        return super().training_step([torch.randn(4, 4, generator=generator)], batch_idx)


def kill(rank: int, folder: Path) -> None:
    """Rank 1, at once."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def fill(rank: int, folder: Path) -> None:
    """The disk, before the third checkpoint is written."""
    if rank == 0:
        with suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))


def cut_short(rank: int, folder: Path) -> None:
    """Rank 0 is killed when half of the next checkpoint is written."""
    if rank == 0:
        save = torch.save

        def save_half(checkpoint, file) -> None:
            save(checkpoint, file)
            file.truncate(file.tell() // 2)
            os.kill(os.getpid(), signal.SIGKILL)

        torch.save = save_half


def terminate(rank: int, folder: Path) -> None:
    """Rank 1 is told to end."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)


FAULTS = {"kill": kill, "fill": fill, "cut_short": cut_short, "terminate": terminate}


class Fault(pl.Callback):
    def __init__(self, name: str, folder: Path, marker: Path) -> None:
        self.name, self.folder, self.marker = name, folder, marker
        self.was_before = marker.exists()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 2 and batch_idx == 3 and not self.was_before:
            self.marker.touch()
            FAULTS[self.name](trainer.global_rank, self.folder)
        if self.name == "terminate" and not self.was_before and self.marker.exists():
            time.sleep(0.2)  # the ranks hear of each other within a second


def main() -> None:
    folder, marker, options = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    (folder / "filler").unlink(missing_ok=True)
    strategy = {"planner": "wfbp", "warmup_steps": 2, **options.get("strategy", {})}
    if strategy.get("compressor") == "topk":
        strategy["compressor"] = TopK(density=0.1, dense_below_numel=0)
        strategy["link"] = AlphaBeta(alpha=1e-3, beta=1e-3)
    ends_early = options.get("fault") == "terminate"  # with a checkpoint of that moment, only
    usual = not ends_early
    callbacks = [ModelCheckpoint(folder, save_last=usual, save_top_k=int(usual))]
    if "fault" in options:
        callbacks.append(Fault(options["fault"], folder, marker))
    if ends_early:
        callbacks.append(OnExceptionCheckpoint(folder, filename="last"))
    trainer = {
        "max_steps": -1,
        "max_epochs": 4,
        "enable_checkpointing": True,
        "callbacks": callbacks,
    }
    pl.seed_everything(1, verbose=False)
    model = Wide()
    settings = {**options, "strategy": strategy, "trainer": trainer, "ckpt_path": "last"}
    report(fit(model, settings), model)


if __name__ == "__main__":
    main()
