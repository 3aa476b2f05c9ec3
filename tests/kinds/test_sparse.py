"""A failure here means: of an unusual training something is lost, or counted twice, under top-k."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from cross_traps import Layers, loader
from kinds import Witness, strategy_of
from lightning.pytorch import LightningModule, callbacks
from ranks import train_ranks
from test_graphs import Recomputed
from test_members import Finetuned, Unconnected
from test_odd_models import Shared
from torch import Tensor, nn
from training import SLOW_LINK, assert_same, quiet_trainer, residual_of

from lightning_mgwfbp import TopK

pytestmark = pytest.mark.slow

TOPK = {"compressor": TopK(0.1, dense_below_numel=0), "link": SLOW_LINK}


class InTurn(LightningModule):
    """Two networks, each with an optimizer, one of them frozen while the other is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 8)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for sign, optimizer in zip((-1.0, 1.0), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.zero_grad()
            x = batch[0].to(self.dtype)
            self.manual_backward(sign * self.critic(self.generator(x).tanh()).tanh().mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(n.parameters(), 0.1) for n in (self.generator, self.critic)]


class OwnBackward(Layers):
    """Two backward calls, each with an exchange of its own."""

    def backward(self, loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.square().backward()


class Books(pl.Callback):
    """What a rank has put in, received and left behind, by parameter.

    Gradients are cleared before each backward, so that what is there after it has just come.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.given: dict[str, Tensor] = {}
        self.received: dict[str, Tensor] = {}
        self.hooks = []
        for name, p in pl_module.named_parameters():
            self.given[name], self.received[name] = torch.zeros_like(p), torch.zeros_like(p)
            self.hooks.append(p.register_hook(partial(_enter, self.given[name])))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for name, p in pl_module.named_parameters():
            if p.grad is not None:
                self.received[name] += p.grad

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.left = residual_of(trainer)
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()


def _enter(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)  # and nothing is returned, which would take the gradient's place


def _keep_books(rank: int, make: Any) -> None:
    pl.seed_everything(7, verbose=False)
    module, books, witness = make(), Books(), Witness()
    trainer = quiet_trainer(
        strategy=strategy_of("mgwfbp_topk", **TOPK),
        max_steps=10,
        precision="64-true",
        callbacks=[books, witness],
    )
    trainer.fit(module, loader())
    assert witness.overlapped
    mine = books.given, books.received, books.left, dict(module.state_dict())
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, mine)
    _balance(*zip(*everyone, strict=True))


def _balance(given: Any, received: Any, left: Any, weights: Any) -> None:
    """What the ranks put in is what they received together, and what they have left."""
    assert_same(*weights)
    assert_same(*received)
    for name, average in received[0].items():
        rests = sum(rank.get(name, torch.zeros_like(average)) for rank in left)
        total = sum(rank[name] for rank in given)
        torch.testing.assert_close(2 * average + rests, total, rtol=1e-12, atol=1e-12)
    assert any(rest.count_nonzero() > rest.numel() / 4 for rest in left[0].values())


MODELS: dict[str, Any] = {
    "in turn": InTurn,
    "own backward": OwnBackward,
    "re-entrant twice": partial(Recomputed, True, 2),
    "shared": Shared,
    "unconnected": Unconnected,
}


@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS)
def test_nothing_is_lost(module: Any) -> None:
    """Error feedback, whatever the graph and whoever steps."""
    train_ranks(_keep_books, module)


def test_a_backbone_that_is_thawed() -> None:
    """Rests of parameters that join later."""
    thaw = partial(callbacks.BackboneFinetuning, 2, backbone_initial_lr=0.05)
    train_ranks(_thaw, thaw)


def _thaw(rank: int, thaw: Any) -> None:
    left: dict[str, Tensor] = {}

    class Rests(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            left.update(residual_of(trainer))

    pl.seed_everything(7, verbose=False)
    module = Finetuned()
    trainer = quiet_trainer(
        strategy=strategy_of("mgwfbp_topk", **TOPK),
        limit_train_batches=3,
        max_epochs=6,
        callbacks=[thaw(), Rests()],
    )
    trainer.fit(module, loader())
    everyone: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(everyone, dict(module.state_dict()))
    assert_same(*everyone)
    assert left["backbone.0.weight"].any()
