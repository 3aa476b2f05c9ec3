"""Trainings whose ranks have unequally many batches, and what they should come to."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from training import SLOW_LINK, make_strategy, quiet_trainer

SIZE = 4  # of a batch
PLANNED = {"planner": "wfbp", "link": SLOW_LINK, "warmup_steps": 3}


class Model(pl.LightningModule):
    """Notes which batches its training_step is called with."""

    def __init__(self, optimizer: str = "sgd", norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(6) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(5, 6), middle, nn.Linear(6, 2))
        self.optimizer_name = optimizer
        self.taken: list[float] = []

    def forward(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.taken.append(float(batch[0].sum()))
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        adam = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.7)
        return [adam], [{"scheduler": schedule, "interval": "step"}]


class Validated(Model):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]), sync_dist=True)


def numbers(rank: int, count: int) -> Tensor:
    """A rank's data, (count * SIZE, 5)."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(100, SIZE, 5, generator=generator)[:count].reshape(-1, 5)


class _Stream(IterableDataset):
    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return ((row,) for row in self._data)


class Batches(list[Any]):
    """One loader; a plain list would be many."""


class Lying(Batches):
    """Says that it has two batches more than it has."""

    def __len__(self) -> int:
        return super().__len__() + 2


def make_loader(kind: str, rank: int, count: int) -> Any:
    data = numbers(rank, count)
    if kind == "sized":
        return DataLoader(TensorDataset(data), batch_size=SIZE)
    if kind == "stream":
        return DataLoader(_Stream(data), batch_size=SIZE)
    batches = [[batch] for batch in data.reshape(-1, SIZE, 5)]
    if kind == "pair":
        return {"one": Batches(batches), "other": Batches(batches)}
    if kind == "cycled":
        return {"one": Batches(batches[: 1 + rank]), "other": Batches(batches)}
    lies = kind == "lying" or (kind == "estimated" and rank == 1)
    return Lying(batches) if lies else Batches(batches)


def make_model(kind: type[Model] = Model, **kwargs: Any) -> Model:
    pl.seed_everything(11, verbose=False)
    return kind(**kwargs)


def fit(
    rank: int,
    counts: Sequence[int],
    *,
    kind: str = "sized",
    strategy: str = "mgwfbp",
    strategy_kwargs: dict[str, Any] | None = None,
    model: type[Model] = Model,
    model_kwargs: dict[str, Any] | None = None,
    epochs: int = 2,
    callbacks: Sequence[type[pl.Callback] | pl.Callback] = (),
    ckpt_path: str | None = None,
    **trainer_kwargs: Any,
) -> dict[str, Any]:
    """Train on rank's `counts[rank]` batches in each epoch, or on what the model loads itself."""
    module = make_model(model, **(model_kwargs or {}))
    options = {"uneven_inputs": "join", **PLANNED, **(strategy_kwargs or {})}
    trainer = quiet_trainer(
        strategy=make_strategy(strategy, **options),
        devices=len(counts),
        max_epochs=epochs,
        use_distributed_sampler=False,
        callbacks=[
            callback() if isinstance(callback, type) else callback for callback in callbacks
        ],
        **trainer_kwargs,
    )
    loaders = [] if kind == "own" else [make_loader(kind, rank, counts[rank])]
    if issubclass(model, Validated):
        loaders.append(make_loader("list", 7, 2))
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return {
        "state": {k: v.clone() for k, v in module.state_dict().items()},
        "steps": trainer.global_step,
        "taken": module.taken,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "callbacks": [_noted(c) for c in trainer.callbacks if type(c) in callbacks],
        "rates": [group["lr"] for o in trainer.optimizers for group in o.param_groups],
    }


def _noted(callback: pl.Callback) -> dict[str, Any]:
    """What it has noted; the rest is Lightning's."""
    return {k: v for k, v in vars(callback).items() if k not in ("log", "log_dict")}


def with_join(rank: int, counts: Sequence[int], epochs: int = 2) -> dict[str, Tensor]:
    """The same by DistributedDataParallel under torch's own Join; with SGD, without momentum, whose
    state ranks that have joined would miss."""
    module = make_model()
    ddp = DistributedDataParallel(module)
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        with Join([ddp], divide_by_initial_world_size=False):
            for batch in make_loader("list", rank, counts[rank]):
                optimizer.zero_grad()
                ddp(batch[0]).backward()
                optimizer.step()
    dist.barrier()
    return module.state_dict()


def by_hand(
    counts: Sequence[int], *, epochs: int = 2, accumulate: int = 1, **model_kwargs: Any
) -> dict[str, Tensor]:
    """The same in one process: each step's mean over the ranks that have a batch when its window
    begins, and the buffers of the lowest that has one when it ends. Rank 0's state."""
    modules = [make_model(**model_kwargs)]
    modules += [copy.deepcopy(modules[0]) for _ in counts[1:]]
    made = [module.configure_optimizers() for module in modules]
    optimizers = [m[0][0] if isinstance(m, tuple) else m for m in made]
    schedules = [m[1][0]["scheduler"] for m in made if isinstance(m, tuple)]
    data = [make_loader("list", rank, count) for rank, count in enumerate(counts)]
    for _ in range(epochs):
        for begin in range(0, max(counts), accumulate):
            for module in modules:
                module.zero_grad()
            end = min(begin + accumulate, max(counts))
            for rank, batches in enumerate(data):
                for batch in batches[begin:end]:
                    (modules[rank](batch[0]) / accumulate).backward()
            _average(modules, [r for r, count in enumerate(counts) if count > begin])
            for step in (*optimizers, *schedules):
                step.step()
            _copy_buffers(modules, min(r for r, count in enumerate(counts) if count >= end))
    return modules[0].state_dict()


def _average(modules: Sequence[nn.Module], contributors: Sequence[int]) -> None:
    weight = 1.0 / len(contributors)
    for parameters in zip(*(module.parameters() for module in modules), strict=True):
        parts = [parameters[rank].grad * weight for rank in contributors]
        for parameter in parameters:
            parameter.grad = torch.stack(parts).sum(0)


def _copy_buffers(modules: Sequence[nn.Module], root: int) -> None:
    for buffers in zip(*(module.buffers() for module in modules), strict=True):
        for buffer in buffers:
            buffer.copy_(buffers[root])
