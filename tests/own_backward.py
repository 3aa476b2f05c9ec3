"""Trainings in which users call backward for purposes of their own, wherever they can."""

from __future__ import annotations

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from training import make_strategy, quiet_trainer

from lightning_mgwfbp.engine.reducer import Reducer

# In which hooks; "attack" is in training_step, and leaves gradients to be cleared or to be used.
EVERYWHERE = (
    "attack",
    "on_train_batch_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)
# where deferred steps are neither refused nor given up
UNDER_DEFERRED_STEPS = (
    "attack",
    "validation_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
)


class OwnBackwards(pl.LightningModule):
    """A small network, of whose gradients pictures are taken.

    Args:
        where: in which hooks.
        ranks: which ranks take them.
        first_step: from which step on.
        on_copy: use a copy of the network, as who trusts nobody would.
        momentum: of SGD.
    """

    def __init__(
        self,
        where: tuple[str, ...],
        ranks: tuple[int, ...] = (0, 1),
        first_step: int = 0,
        on_copy: bool = False,
        momentum: float = 0.9,
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )
        self.where, self.ranks, self.first_step = where, ranks, first_step
        self.on_copy, self.momentum = on_copy, momentum
        self.pictures = 0
        self.wrong: list[str] = []
        for hook in set(where) & set(EVERYWHERE[1:]) - {"validation_step"}:
            setattr(self, hook, lambda *_, hook=hook: self.take_picture(hook))

    def is_on(self, hook: str) -> bool:
        here = self.global_rank in self.ranks and self.global_step >= self.first_step
        return hook in self.where and here

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        if self.is_on("attack"):
            x = self.attacked(x, clears=batch_idx % 2 == 0)
        return self.loss(self.net, x)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.take_picture("validation_step")

    def attacked(self, x: Tensor, clears: bool) -> Tensor:
        net = copy.deepcopy(self.net) if self.on_copy else self.net
        x = x.clone().requires_grad_()
        self.loss(net, x).backward()
        assert x.grad is not None
        if clears:
            net.zero_grad()  # otherwise Lightning does, between training_step and backward
        self.pictures += 1
        return (x + 0.1 * x.grad.sign()).detach()

    def take_picture(self, hook: str) -> None:
        """`.grad` must be this rank's own gradient, and afterwards what it was."""
        if not self.is_on(hook):
            return
        net = copy.deepcopy(self.net) if self.on_copy else self.net
        parameters = list(net.parameters())
        kept = [p.grad for p in parameters]
        x = torch.full((2, 8), 0.1 * (1 + self.global_rank))
        with torch.enable_grad():
            expected = torch.autograd.grad(self.loss(net, x), parameters)
            net.zero_grad()
            self.loss(net, x).backward()
        for (name, p), gradient in zip(net.named_parameters(), expected, strict=True):
            if p.grad is None or not torch.equal(p.grad, gradient):
                self.wrong.append(f"{hook}, step {self.global_step}: {name}")
        for p, gradient in zip(parameters, kept, strict=True):
            p.grad = gradient
        self.pictures += 1

    def loss(self, net: nn.Module, x: Tensor) -> Tensor:
        return net(x).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


class ByHand(OwnBackwards):
    """The same, by manual optimization, with a bare backward that is part of the training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def fit_with_own_backwards(
    rank: int, strategy: str, strategy_kwargs: dict[str, Any], by_hand: bool = False, **module: Any
) -> dict[str, Any]:
    """Two epochs of ten steps; weights, what was wrong, and groups launched during backward."""
    torch.manual_seed(3)
    kind = ByHand if by_hand else OwnBackwards
    model = kind(**module)
    data = torch.randn(160, 8, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(data), batch_size=8)
    chosen = make_strategy(strategy, **strategy_kwargs)
    trainer = quiet_trainer(
        strategy=chosen,
        max_epochs=2,
        limit_val_batches=1,
        val_check_interval=5,
        inference_mode=False,
    )
    with _counted_launches() as launches:
        trainer.fit(model, loader, DataLoader(TensorDataset(data[:16]), batch_size=8))
    return {
        "state": {name: value.clone() for name, value in model.net.state_dict().items()},
        "wrong": model.wrong,
        "pictures": model.pictures,
        "launched in backward": sum(launches),
    }


class _counted_launches:
    """How many groups each call of a gradient's hook launches."""

    def __enter__(self) -> list[int]:
        launches: list[int] = []
        self._launch = launch = Reducer._launch_ready

        def counted(reducer: Reducer) -> None:
            before = reducer._round.launched
            launch(reducer)
            launches.append(reducer._round.launched - before)

        Reducer._launch_ready = counted  # type: ignore[method-assign]
        return launches

    def __exit__(self, *_: object) -> None:
        Reducer._launch_ready = self._launch  # type: ignore[method-assign]
