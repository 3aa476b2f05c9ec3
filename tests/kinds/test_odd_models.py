"""A failure here means: a model of an unusual shape is not trained as under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers, Trap
from kinds import BACKWARD, CROSS, Kind, assert_equal_to_oracle
from torch import Tensor, nn
from torch.nn.utils import parametrizations

pytestmark = pytest.mark.slow


class Shared(Trap):
    """Tied weights; a module under two names; weights that are computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.same = self.second
        self.weight_norm = parametrizations.weight_norm(nn.Linear(8, 8))
        self.spectral_norm = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(8, 8))

    def loss(self, x: Tensor, step: int) -> Tensor:
        for layer in (self.first, self.weight_norm, self.second, self.spectral_norm, self.same):
            x = layer(x).tanh()
        return self.orthogonal(x).square().mean()


class Odd(Layers):
    """Parameters of all shapes, layouts and dtypes, mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.wide_complex = nn.Parameter(torch.randn(2, 4, dtype=torch.complex128))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(8).bfloat16())
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        self.every_other = nn.Parameter(torch.randn(16)[::2])
        self.image = nn.Conv2d(2, 8, 2).to(memory_format=torch.channels_last)

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = x * self.scalar + torch.view_as_real(self.complex * self.complex.conj()).sum(-1)
        x = torch.cat([x, self.empty]) * self.transposed + self.image(x.view(4, 2, 2, 2)).flatten(1)
        x = x + self.narrow.float() + self.wide_complex.abs().flatten().float()
        return super().loss(x, step) + (x * self.wide * self.every_other).square().mean().float()


class Huge(Layers):
    """One parameter that is larger than all others together, several times over: 20 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Embedding(650_000, 8)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return super().loss(x + self.huge(torch.tensor([step, 7, self.global_rank, 9])), step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Named(Trap):
    """Names of 500 characters that differ in the last, beyond ASCII, and like paths and indices."""

    def __init__(self) -> None:
        super().__init__()
        names = ("n" * 500, "n" * 499 + "m", "größe 层", "0", "a/b", "{}", "%s", "weight")
        self.layers = nn.ModuleDict({name: nn.Linear(8, 8) for name in names})

    def loss(self, x: Tensor, step: int) -> Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x.square().mean()


class Many(Trap):
    """2,000 parameters of one number each."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterList([torch.randn(1) for _ in range(2000)])

    def loss(self, x: Tensor, step: int) -> Tensor:
        return (torch.cat(list(self.numbers)).view(8, 250).t() @ x.t()).tanh().square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class One(Trap):
    """A single parameter, of as many numbers as asked for."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.randn(shape))

    def loss(self, x: Tensor, step: int) -> Tensor:
        return (x * self.only).tanh().square().mean()


MODELS: dict[str, Any] = {
    "shared": Shared,
    "odd": Odd,
    "named": Named,
    "one": partial(One, 8),
    "one number": partial(One, 1),
    "one without dimensions": One,
}
SHORT = {"max_steps": 4}
LARGE: dict[str, Any] = {
    "huge, in groups": Kind(Huge, SHORT, options={"planner": "auto"}),
    "huge, in one": Kind(Huge, SHORT, options={"planner": "single"}),
    "many, in groups": Kind(Many, SHORT, strategies=(BACKWARD, CROSS), options={"planner": "auto"}),
    "many, in one": Kind(Many, SHORT, options={"planner": "single"}),
}


@pytest.mark.filterwarnings("ignore:Horovod cannot sum bfloat16")
@pytest.mark.parametrize("module", MODELS.values(), ids=MODELS)
def test_a_message_for_each_tensor(module: Any) -> None:
    """Buckets, names and keys."""
    assert_equal_to_oracle(Kind(module))


@pytest.mark.parametrize("kind", LARGE.values(), ids=LARGE)
def test_large_and_many(kind: Kind) -> None:
    """Merge groups of very unequal sizes."""
    assert_equal_to_oracle(kind)
