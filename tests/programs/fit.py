"""Started by tests as a user's script: fit a small model and print each rank's weights.

python fit.py '{"strategy": {...}, "trainer": {...}, "save_dir": "...", "raises": 1, "timeout": 6,
"ckpt_path": "last"}'
"""

import json
import os
import signal
import sys
from datetime import timedelta

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgwfbp import MGWFBPStrategy, WarmupCallback


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Raise(pl.Callback):
    """Ends one rank, after the plan."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_backward(self, trainer, pl_module, loss):
        if trainer.global_rank == self.rank and trainer.global_step == 7:
            raise ValueError(f"rank {self.rank} raises")


def loader() -> DataLoader:
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), batch_size=4)


def fit(model: pl.LightningModule, options: dict) -> pl.Trainer:
    callbacks = [WarmupCallback(options.get("save_dir"))]
    if "raises" in options:
        callbacks.append(Raise(options["raises"]))
    strategy = options.get("strategy", {})
    if "timeout" in options:
        strategy = {**strategy, "timeout": timedelta(seconds=options["timeout"])}
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": 8,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            "strategy": MGWFBPStrategy(**strategy),
            **options.get("trainer", {}),
        }
    )
    trainer.fit(model, loader(), ckpt_path=options.get("ckpt_path"))
    return trainer


def report(trainer: pl.Trainer, model: pl.LightningModule) -> None:
    total = sum(p.double().sum().item() for p in model.parameters())
    print(
        f"\nRESULT {os.getpid()} {trainer.global_rank} {trainer.world_size} {total:.12f}",
        flush=True,
    )


def main() -> None:
    # shells start what runs in the background with it ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    pl.seed_everything(1, verbose=False)
    model = Line()
    report(fit(model, json.loads(sys.argv[1])), model)


if __name__ == "__main__":
    main()
