"""A failure here means: optimization by hand, or a backward of one's own, is not as under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers
from kinds import AVERAGING, BACKWARD, HOROVOD, Kind, assert_equal_to_oracle
from lightning.pytorch import LightningModule
from torch import Tensor, nn

pytestmark = pytest.mark.slow


class Adversaries(LightningModule):
    """A generator and a critic, stepped by hand in turn.

    Args:
        toggles: freeze one while the other is trained.
        parts: backward calls for each step.
        penalty: of the critic's gradient, which makes backward go through autograd.grad.
    """

    def __init__(self, toggles: bool, parts: int = 1, penalty: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles, self.parts, self.penalty = toggles, parts, penalty
        self.seen: list[Tensor] = []
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        networks = self.generator, self.critic
        for network, optimizer in zip(networks, self.optimizers(), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            for part in range(self.parts):
                x = batch[0] + part
                loss = self.critic(self.generator(x)).mean()
                if network is self.critic:
                    loss = self.penalty * self._penalty(x) - loss
                self.manual_backward(loss)
            self.seen += [p.grad.clone() for p in network.parameters() if p.grad is not None]
            optimizer.step()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def _penalty(self, x: Tensor) -> Tensor:
        x = self.generator(x).detach().requires_grad_()
        score = self.critic(x).sum()
        (gradient,) = torch.autograd.grad(score, x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.RMSprop(self.critic.parameters(), lr=1e-2),
        )


class Unequal(LightningModule):
    """Two optimizers by hand; the critic steps three times for each step of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()
        optimizer = generator if batch_idx % 4 == 3 else critic
        loss = self.critic(self.generator(batch[0])).tanh().mean()
        optimizer.zero_grad()
        self.manual_backward(loss if optimizer is generator else -loss)
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.critic.parameters(), lr=1e-1, momentum=0.9),
        )


class Window(Layers):
    """Accumulates over two parts of each batch, of which only the last one's backward exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(super().training_step(batch, batch_idx))
            self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]
        self.manual_backward(super().training_step([batch[0] + 1], batch_idx))
        optimizer.step()
        optimizer.zero_grad()


class OwnBackward(Layers):
    """Looks at gradients as soon as a backward of its own has ended."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]


class ClippedInBackward(Layers):
    """Clips there, which is only right on averages."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.seen.append(nn.utils.clip_grad_norm_(self.parameters(), 0.01))


BY_HAND = {
    "in turn": partial(Adversaries, False),
    "toggled": partial(Adversaries, True),
    "gradient penalty": partial(Adversaries, False, 1, 10.0),
    "toggled, with a penalty": partial(Adversaries, True, 1, 10.0),
    "unequally often": Unequal,
}


@pytest.mark.parametrize("module", BY_HAND.values(), ids=BY_HAND)
def test_several_optimizers(module: Any) -> None:
    """Parameters of all optimizers in one exchange, of which one steps."""
    assert_equal_to_oracle(Kind(module, {"max_steps": 12}, strategies=AVERAGING))


@pytest.mark.parametrize("toggles", [False, True])
def test_several_backwards_in_a_step(toggles: bool) -> None:
    """Averages that the next backward adds to."""
    module = partial(Adversaries, toggles, parts=3)
    # where something may be left behind, averages are set aside and added, which rounds otherwise
    assert_equal_to_oracle(Kind(module, {"max_steps": 12}, strategies=(BACKWARD, HOROVOD)))


def test_a_backward_that_does_not_exchange() -> None:
    """`block_backward_sync`, in the place of `trainer.model.no_sync()`."""
    assert_equal_to_oracle(Kind(Window, {"max_steps": 12}, strategies=(BACKWARD, HOROVOD)))


@pytest.mark.parametrize("module", [OwnBackward, ClippedInBackward])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_backward_of_ones_own_sees_averages(module: Any, accumulate: int) -> None:
    """`LightningModule.backward`, which looks at `.grad` before the strategy is back in charge."""
    trainer = {"accumulate_grad_batches": accumulate}
    assert_equal_to_oracle(Kind(module, trainer, strategies=AVERAGING))
