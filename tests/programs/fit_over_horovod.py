"""Started by tests under each launcher: `fit.py` over Horovod, checking what Lightning knows of
ranks and sends between them.

python fit_over_horovod.py '{"trainer": {...}}' FOLDER
"""

import json
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import lightning.pytorch as pl
import torch
from fit import Line, fit, loader, report
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import CatMetric, MeanMetric

from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport


class Checked(Line):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.every = CatMetric()
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        samples = self.all_gather(batch[0])
        assert torch.equal(samples[self.global_rank], batch[0])
        self.seen.append(samples)
        self.log_ranks()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log_ranks()

    def log_ranks(self) -> None:
        """Log each rank's number, as a number and as a metric."""
        own = torch.tensor(float(self.global_rank))
        self.mean(own)
        self.every.update(own.expand(self.global_rank + 1))  # of another length on each rank
        once = {"on_step": False, "on_epoch": True, "batch_size": 4}
        self.log("number", own, sync_dist=True, **once)
        self.log("sum", own, sync_dist=True, reduce_fx="sum", **once)
        self.log("metric", self.mean, **once)


class Checks(pl.Callback):
    """What the strategy and the Trainer say, in the middle of fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer, pl_module):
        check_ranks(trainer)
        check_collectives(trainer, pl_module)
        check_barrier(trainer, self.folder)

    def on_train_epoch_end(self, trainer, pl_module):
        lengths = torch.arange(trainer.world_size) + 1
        expected = torch.arange(trainer.world_size).repeat_interleave(lengths * len(pl_module.seen))
        assert torch.equal(pl_module.every.compute().sort().values, expected.float())


def check_ranks(trainer) -> None:
    assert isinstance(trainer.strategy.session.reducer.exchanger.transport, HorovodTransport)
    rank, size = trainer.global_rank, trainer.world_size
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.cross_rank()) == (trainer.local_rank, trainer.node_rank)
    assert trainer.is_global_zero == (rank == 0)
    assert rank_zero_only.rank == rank
    sampler = trainer.train_dataloader.sampler
    assert isinstance(sampler, DistributedSampler)
    assert (sampler.rank, sampler.num_replicas) == (rank, size)


def check_collectives(trainer, pl_module) -> None:
    strategy, rank, size = trainer.strategy, trainer.global_rank, trainer.world_size
    numbers = torch.arange(size, dtype=torch.float32)
    own = numbers[rank]
    assert strategy.reduce(own.clone(), reduce_op="mean") == numbers.mean()
    assert strategy.reduce(own.clone(), reduce_op="sum") == numbers.sum()
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(rank == 0, all=True)
    assert [strategy.broadcast(f"of {rank}", src) for src in range(size)] == [
        f"of {src}" for src in range(size)
    ]
    gathered = pl_module.all_gather({"own": own, "twice": [2 * own]})
    assert torch.equal(gathered["own"], numbers)
    assert torch.equal(gathered["twice"][0], 2 * numbers)
    leaf = own.clone().requires_grad_()
    with torch.enable_grad():
        pl_module.all_gather(leaf, sync_grads=True).sum().backward()
    assert leaf.grad == size


def check_barrier(trainer, folder: Path) -> None:
    if trainer.is_global_zero:
        time.sleep(0.3)  # the others would be through a barrier that is none
    (folder / f"rank {trainer.global_rank}").touch()
    trainer.strategy.barrier("all files are there")
    assert len(list(folder.iterdir())) == trainer.world_size


def check_logged(trainer) -> None:
    numbers = torch.arange(trainer.world_size, dtype=torch.float32)
    logged = trainer.callback_metrics
    assert logged["number"] == logged["metric"] == numbers.mean()
    assert logged["sum"] == numbers.sum() * len(loader()) // trainer.world_size


def check_sampled(model: Checked) -> None:
    """An epoch is every sample once, whichever rank it went to."""
    samples = torch.cat(model.seen).flatten(0, 1)
    everything = torch.cat([batch[0] for batch in loader()])
    assert samples.shape == everything.shape
    assert torch.equal(samples.unique(dim=0), everything.unique(dim=0))


def main() -> None:
    options, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    options["trainer"] = {"strategy": "mgwfbp_horovod", **options.get("trainer", {})}
    checked = {"trainer": {**options["trainer"], "callbacks": [Checks(folder)]}}
    pl.seed_everything(1, verbose=False)
    model = Checked()
    trainer = fit(model, checked)
    report(trainer, model)
    check_logged(trainer)
    check_sampled(model)
    trainer.validate(model, loader(), verbose=False)
    check_logged(trainer)
    fit(model, options)  # a second time in these processes


if __name__ == "__main__":
    main()
