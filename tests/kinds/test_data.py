"""A failure here means: batches, buffers or precisions are not as under DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cross_traps import Layers, Trap, loader
from kinds import ALL, BACKWARD, HOROVOD, Kind, assert_equal_to_oracle
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

pytestmark = pytest.mark.slow


class Stream(IterableDataset[Tensor]):
    """As many numbers on each rank, but others."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        assert get_worker_info() is None
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        return iter([[torch.randn(8, generator=generator)] for _ in range(20)])


def streamed() -> Any:
    return DataLoader(Stream(), batch_size=4)


def combined() -> Any:
    return CombinedLoader({"x": loader(1, 48), "y": loader(2, 32)}, "max_size_cycle")


class Combined(Layers):
    def training_step(self, batch: dict[str, list[Tensor]], batch_idx: int) -> Tensor:
        return super().training_step([batch["x"][0] - batch["y"][0]], batch_idx)


class Normalised(Trap):
    """Statistics that differ from rank to rank, and dropout by seeds that do, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8)
        )

    def loss(self, x: Tensor, step: int) -> Tensor:
        torch.manual_seed(100 * step + self.global_rank)
        return self.net(x).square().mean()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.seen.append(self.net(batch[0]).square().mean())


LOADERS: dict[str, Any] = {"streamed": (Layers, streamed), "combined": (Combined, combined)}


@pytest.mark.parametrize(("module", "loaders"), LOADERS.values(), ids=LOADERS)
def test_loaders(module: Any, loaders: Any) -> None:
    """Batches of another shape, without a sampler."""
    trainer = {"max_epochs": 2, "max_steps": -1}
    assert_equal_to_oracle(Kind(module, trainer, loaders=loaders))


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
@pytest.mark.parametrize("refreshed", [True, False])
def test_buffers(refreshed: bool) -> None:
    """BatchNorm under broadcast_buffers; dropout."""
    buffers = {"broadcast_buffers": refreshed}
    validated = {"limit_train_batches": 4, "max_epochs": 2, "max_steps": -1, "limit_val_batches": 2}
    kind = Kind(Normalised, validated, options=buffers, oracle_options=buffers)
    assert_equal_to_oracle(kind)


@pytest.mark.filterwarnings("ignore:Horovod cannot sum bfloat16")
@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true", "16-true"])
def test_precisions(precision: str) -> None:
    """Buckets of the plugin's dtype, gradients under autocast."""
    exact = (BACKWARD, HOROVOD) if precision in ("bf16-true", "16-true") else ALL
    assert_equal_to_oracle(Kind(Descending, {"precision": precision}, strategies=exact))


class Descending(Layers):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
