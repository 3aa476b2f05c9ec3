"""What the Trainer tests run on each rank: train something small, return everything comparable."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgwfbp import AlphaBeta

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.digits import DigitsData, DigitsModule
from examples.gpt import GPTModule, StdlibText

# so slow that whatever can be compressed is, however long a message takes on this machine
SLOW_LINK = AlphaBeta(alpha=1e-3, beta=1e-3)


class Toy(pl.LightningModule):
    """A few layers, one of which `use(batch_idx, rank)` may leave out."""

    def __init__(self, optimizer: str = "sgd", use: Any = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.stem = nn.Linear(8, 16, dtype=dtype)
        self.side = nn.Linear(16, 16, dtype=dtype)
        self.head = nn.Linear(16, 4, dtype=dtype)
        self.optimizer_name = optimizer
        self.use = use

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.stem(batch[0]))
        if self.use is None or self.use(batch_idx, self.global_rank):
            hidden = hidden + torch.tanh(self.side(hidden))
        return self.head(hidden).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer_name == "adam":
            return torch.optim.Adam(self.parameters(), lr=1e-2)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Drawn(Toy):
    """Draws its data by step and rank, so that it goes on alike wherever it is resumed."""

    def loss(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        seed = 1000 * self.global_step + 10 * batch_idx + self.global_rank
        drawn = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        return super().loss([drawn.to(batch[0].dtype)], batch_idx)


class ToyData(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        data = torch.randn(1024, 8, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(data), batch_size=4)


def drawn(**kwargs: Any) -> tuple[Drawn, ToyData]:
    return Drawn(**kwargs), ToyData()


def toy(**kwargs: Any) -> tuple[Toy, ToyData]:
    return Toy(**kwargs), ToyData()


def digits() -> tuple[DigitsModule, DigitsData]:
    return DigitsModule(width=8), DigitsData(batch_size=8)


def gpt() -> tuple[GPTModule, StdlibText]:
    module = GPTModule(layers=2, heads=2, width=32, context=32, dropout=0.1, warmup_steps=4)
    return module, StdlibText(block_size=32, batch_size=4, max_bytes=60_000)


MODELS = {"toy": toy, "drawn": drawn, "digits": digits, "gpt": gpt}


class Recorder(pl.Callback):
    """Losses of every batch, and averaged gradients of every step."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.gradients: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({n: p.grad.clone() for n, p in named if p.grad is not None})


class Books(pl.Callback):
    """What a rank has put in, received, and left behind, by parameter, in the units of its loss."""

    def __init__(self) -> None:
        self.given: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self.left: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.given[name], self.received[name] = torch.zeros_like(p), torch.zeros_like(p)
            self._hooks.append(p.register_hook(partial(_enter, self.given[name])))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for name, p in pl_module.named_parameters():
            if p.grad is not None:
                self.received[name] += p.grad

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.left = residual_of(trainer)
        for hook in self._hooks:
            hook.remove()


def _enter(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)  # and nothing is returned, which would take the gradient's place


def residual_of(trainer: pl.Trainer) -> dict[str, Tensor]:
    """What this rank has left behind, by parameter."""
    state: dict[str, Any] = trainer.strategy.session.reducer.exchanger.state_dict()
    return state.get("residual", {})


def sparse(compressor: Any, **kwargs: Any) -> dict[str, Any]:
    """Arguments of a strategy that sends every tensor by itself, compressed."""
    defaults = {"planner": "wfbp", "link": SLOW_LINK, "warmup_steps": 3}
    return {"compressor": compressor, **defaults, **kwargs}


def make_strategy(name: str, **kwargs: Any) -> Any:
    entry = StrategyRegistry[name]
    return entry["strategy"](**{**entry["init_params"], **kwargs})


def quiet_trainer(**kwargs: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 2,
        "max_epochs": -1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return pl.Trainer(**{**defaults, **kwargs})


def train(
    rank: int,
    strategy: str,
    model: str = "toy",
    steps: int = 20,
    strategy_kwargs: dict[str, Any] | None = None,
    model_kwargs: dict[str, Any] | None = None,
    **trainer_kwargs: Any,
) -> dict[str, Any]:
    """Fit `model` for `steps` optimizer steps; weights, buffers, losses, gradients, plan."""
    pl.seed_everything(7, verbose=False)
    module, data = MODELS[model](**(model_kwargs or {}))
    recorder = Recorder()
    chosen = make_strategy(strategy, **(strategy_kwargs or {}))
    trainer = quiet_trainer(
        strategy=chosen, max_steps=steps, callbacks=[recorder], **trainer_kwargs
    )
    trainer.fit(module, data)
    tuned = getattr(chosen, "tuned", None)
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "steps": trainer.global_step,
        "plan": None if tuned is None else tuned.plan,
    }


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], what: str = "") -> None:
    """Two state dicts are equal bit for bit."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), (
            f"{what}{name} differs by {(value - theirs[name]).abs().max()}"
        )
