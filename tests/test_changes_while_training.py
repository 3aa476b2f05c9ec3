"""A failure here is a layer or an optimizer that was changed in the middle of fit, unseen."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from ranks import train_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import assert_same, make_strategy, quiet_trainer, sparse

from lightning_mgwfbp import TopK

pytestmark = pytest.mark.slow

BATCHES = 8  # in each epoch, of each rank
FINE: dict[str, Any] = {"planner": "wfbp", "warmup_steps": 3}
STRATEGIES = {
    "mgwfbp": FINE,
    "mgwfbp_cross_iteration": FINE,
    "mgwfbp_topk": sparse(TopK(density=0.2, dense_below_numel=0)),
    "mgwfbp_horovod": FINE,
}


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


def data() -> Tensor:
    return torch.randn(2 * BATCHES * 4, 4, generator=torch.Generator().manual_seed(5))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def change(how: str, net: nn.Sequential, optimizer: torch.optim.Optimizer, seed: int = 7) -> None:
    """What does not go by the Trainer."""
    torch.manual_seed(seed)
    if how == "layer replaced":
        net[4] = nn.Linear(6, 3)
        optimizer.add_param_group({"params": list(net[4].parameters())})
    elif how == "units cut off":
        for p, dim in ((net[2].weight, 0), (net[2].bias, 0), (net[4].weight, 1)):
            p.data, p.grad = p.data.narrow(dim, 0, 4).clone(), None
        optimizer.state.clear()


CHANGES = ("optimizer assigned", "optimizers set up again", "layer replaced", "units cut off")


class Changed(pl.LightningModule):
    """Changes something at the beginning of the second epoch, on the ranks given."""

    def __init__(self, how: str, on_ranks: tuple[int, ...], own_seeds: bool) -> None:
        super().__init__()
        self.net, self.how, self.on_ranks, self.own_seeds = network(), how, on_ranks, own_seeds

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_epoch_start(self) -> None:
        if self.current_epoch != 1 or self.global_rank not in self.on_ranks:
            return
        if self.how == "optimizer assigned":
            self.trainer.optimizers = [sgd(self.net)]
        elif self.how == "optimizers set up again":
            self.trainer.strategy.setup_optimizers(self.trainer)
        else:
            seed = 7 + self.global_rank * self.own_seeds
            change(self.how, self.net, self.trainer.optimizers[0], seed)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return sgd(self.net)


def fit(
    rank: int,
    strategy: str,
    kwargs: dict[str, Any],
    how: str,
    on_ranks: tuple[int, ...] = (0, 1),
    own_seeds: bool = False,
) -> dict[str, Tensor]:
    module = Changed(how, on_ranks, own_seeds)
    loader = DataLoader(TensorDataset(data()[rank::2]), batch_size=4)
    trainer = quiet_trainer(
        strategy=make_strategy(strategy, **kwargs), max_epochs=3, use_distributed_sampler=False
    )
    trainer.fit(module, loader)
    return {name: value.clone() for name, value in module.net.state_dict().items()}


def alone(how: str) -> dict[str, Tensor]:
    """One process that averages by itself."""
    net = network()
    optimizer = sgd(net)
    samples = data()
    for epoch in range(3):
        if epoch == 1:
            change(how, net, optimizer)
            if how.startswith("optimizer"):
                optimizer = sgd(net)
        for batch in range(BATCHES):
            optimizer.zero_grad()
            for rank in range(2):
                x = samples[rank::2][4 * batch : 4 * batch + 4]
                (net(x).square().mean() / 2).backward()
            optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize(
    "strategy",
    [pytest.param(s, marks=[pytest.mark.horovod] if "horovod" in s else []) for s in STRATEGIES],
)
def test_all_ranks_go_on_with_it(strategy: str) -> None:
    """The ranks drift apart, or the new parameters never move."""
    for how in CHANGES:
        first, second = train_ranks(fit, strategy, STRATEGIES[strategy], how)
        assert_same(first, second, f"{how}, rank 0 and 1: ")
        for name, expected in alone(how).items() if "topk" not in strategy else ():
            torch.testing.assert_close(first[name], expected, msg=lambda m, how=how: f"{how}: {m}")


@pytest.mark.parametrize("strategy", ["mgwfbp", "mgwfbp_cross_iteration"])
def test_new_values_are_rank_0s(strategy: str) -> None:
    """Each rank goes on with what it has drawn for itself."""
    first, second = train_ranks(fit, strategy, FINE, "layer replaced", (0, 1), True)
    assert_same(first, second)


@pytest.mark.parametrize(
    ("how", "strategy"),
    [("layer replaced", "mgwfbp_cross_iteration"), ("units cut off", "mgwfbp")],
)
def test_what_one_rank_alone_changes(how: str, strategy: str) -> None:
    """It waits for the others, or trains on."""
    with pytest.raises(RuntimeError, match=r"The ranks disagree: .*net\.(2|4)") as error:
        train_ranks(fit, strategy, FINE, how, (1,))
    assert str(error.value).count("The ranks disagree") == 2
