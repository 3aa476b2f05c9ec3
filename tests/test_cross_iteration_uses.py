"""A failure here means: a forward uses a weight before its update is complete."""

from __future__ import annotations

import copy
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from cross_traps import Layers, Run, Trap, assert_equal_to_oracle
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import linear
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow


class Tied(Layers):
    """One parameter in two modules, another module twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.d.weight = self.a.weight

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = self.c(self.b(self.c(x).tanh()).tanh())
        return self.a(self.d(x)).square().mean()


class Regularised(Layers):
    """Weights are used before, between and after the modules that own them."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        penalty = self.d.weight.square().sum()
        x = self.a(x).tanh() + self.c.bias
        penalty = penalty + torch.stack([p.norm() for p in (self.b.weight, self.d.bias)]).sum()
        x = self.c(self.b(x).tanh())
        return self.d(x).square().mean() + 1e-2 * (penalty + self.a.weight.abs().sum())


class Raw(Layers):
    """Numbers are read with no graph, in every way that there is."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        read = [
            lambda p: p.data.sum(),
            lambda p: p.detach()[0].clone(),
            lambda p: torch.tensor(p.tolist()),
            lambda p: torch.from_numpy(p.detach().numpy().copy()),
            lambda p: copy.deepcopy(p).detach(),
            lambda p: torch.tensor([float(row.detach().sum()) for row in p]),
            lambda p: torch.cat([p, p]).detach(),
            lambda p: torch.zeros(8).copy_(p.grad[0]) if p.grad is not None else torch.zeros(8),
        ]
        self.seen.append(read[step % len(read)](self.d.weight).clone())
        return super().loss(x, step)


class Target(Layers):
    """A target network that follows at the beginning of a step, by `follow`."""

    def __init__(self, follow: str) -> None:
        super().__init__()
        self.follow = follow
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.pairs = [
            (p.data, q.data)
            for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True)
        ]

    def loss(self, x: Tensor, step: int) -> Tensor:
        getattr(self, self.follow)()
        return (self.net(x) - self.target(x) - 1).square().mean() + super().loss(x, step)

    @torch.no_grad()
    def by_parameters(self) -> None:
        for p, q in zip(self.net.parameters(), self.target.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)

    def by_lists(self) -> None:
        torch._foreach_lerp_(
            [q.data for q in self.target.parameters()], list(self.net.parameters()), 0.1
        )

    def by_aliases(self) -> None:
        for p, q in self.pairs:
            q.mul_(0.9).add_(p, alpha=0.1)

    def by_state(self) -> None:
        self.target.load_state_dict(self.net.state_dict())

    def by_copy(self) -> None:
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def by_inference(self) -> None:
        with torch.inference_mode():
            self.seen.append(self.net(torch.ones(8)).clone())


class Functional(Layers):
    """Parameters are handed on as values, and wrapped by torch.func."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        values = {name: p * 1.5 for name, p in self.a.named_parameters()}
        x = functional_call(self.a, values, (x,))
        gradient = grad(lambda w: linear(x.detach(), w, self.c.bias).tanh().sum())(self.b.weight)
        by_module = grad(lambda p: functional_call(self.d, p, (x.detach(),)).tanh().sum())(
            dict(self.d.named_parameters())
        )
        x = self.d(self.c(self.b(x)).tanh())
        return (x * gradient.sum() * by_module["weight"].sum()).tanh().mean()


class Recurrent(Layers):
    """Functions that are given lists of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.gru = nn.GRUCell(8, 8)

    def loss(self, x: Tensor, step: int) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x[None], [4], batch_first=True)
        hidden = nn.utils.rnn.unpack_sequence(self.lstm(packed)[0])[0]
        return super().loss(self.gru(hidden), step)


class Reparametrized(Layers):
    """Weights that are computed from parameters, in hooks and properties."""

    def __init__(self) -> None:
        super().__init__()
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(self.a)
        parametrizations.weight_norm(self.b)
        parametrizations.spectral_norm(self.c)
        parametrize.register_parametrization(self.d, "weight", Doubled())

    def loss(self, x: Tensor, step: int) -> Tensor:
        early = self.d.weight.sum()
        with parametrize.cached():
            return super().loss(x, step) + 1e-2 * early


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Attention(Layers):
    """A module that uses its child's weights without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = self.attention(x[None], x[None], x[None])[0]
        return super().loss(self.encoder(x)[0], step)


class Dynamic(Layers):
    """Modules are called in any order, several times, not at all, or on one rank only."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        layers = [self.a, self.b, self.c, self.d]
        order = torch.randperm(4, generator=torch.Generator().manual_seed(step)).tolist()
        for i in order[: 1 + step % 4] + order[:1]:
            x = layers[i](x).tanh()
        if self.global_rank == step % 2:
            x = self.d(x)
        return x.square().mean()


class Changing(Layers):
    """Layers are frozen, thawed and added, and options changed, in the middle of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(chain(self.a.parameters(), self.c.parameters()), lr=0.1)

    def loss(self, x: Tensor, step: int) -> Tensor:
        optimizer = self.trainer.optimizers[0]
        if step == 3:
            self.b.requires_grad_(True)
            optimizer.add_param_group({"params": list(self.b.parameters()), "lr": 0.05})
        if step == 4:
            self.a.requires_grad_(False)
        if step == 5:
            optimizer.add_param_group({"params": list(self.d.parameters()), "momentum": 0.5})
            optimizer.param_groups[0]["lr"] = 0.3
        return super().loss(x, step)


class Checkpointed(Layers):
    """Forwards that run again within backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = checkpoint(self._inner, self.a(x), use_reentrant=self.use_reentrant)
        return self.d(x).square().mean()

    def _inner(self, x: Tensor) -> Tensor:
        return self.c((self.b(x) + self.d.bias).tanh())


class Penalty(Layers):
    """Gradients of gradients."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = x.requires_grad_()
        loss = super().loss(x, step)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class Odd(Layers):
    """Complex, scalar and empty parameters, of several dtypes, and one without any use."""

    def __init__(self) -> None:
        super().__init__()
        self.complex = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.wide = nn.Parameter(torch.randn(8, dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(8).bfloat16())
        self.idle = nn.Parameter(torch.ones(3))

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = x * self.scalar + torch.view_as_real(self.complex * self.complex.conj()).sum(-1)
        x = torch.cat([x, self.empty]) + self.narrow.float()
        return super().loss(x, step) + (x * self.wide).square().mean().float()


class Images(Trap):
    """Strides of channels_last, and buffers that batches change."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)
        ).to(memory_format=torch.channels_last)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return self.net(x.view(4, 2, 2, 2)).square().mean() + self.net(x.view(4, 2, 2, 2)).sum()


class Rows(Layers):
    """A sparse gradient, which takes the step whole."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 8, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, x: Tensor, step: int) -> Tensor:
        return super().loss(x + self.rows(torch.tensor([step, 3, 3, self.global_rank])), step)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class Custom(Layers):
    """Functions whose inside autograd does not see; a new storage; a module that comes late."""

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = OwnFunction.apply(x, self.d.weight)
        with torch.no_grad():
            if step == 3:
                self.c.weight.data = self.c.weight.data * 2
            self.b.bias.clamp_(-0.01, 0.01)
            self.a.bias.data.fill_(step)
        return super().loss(x, step)


USES = {
    "tied": Run(Tied),
    "regularised": Run(Regularised),
    "raw": Run(Raw, {"max_steps": 10}),
    **{
        f"target {follow}": Run(partial(Target, f"by_{follow}"))
        for follow in ("parameters", "lists", "aliases", "state", "copy", "inference")
    },
    "functional": Run(Functional),
    "recurrent": Run(Recurrent),
    "reparametrized": Run(Reparametrized),
    "attention": Run(Attention),
    "dynamic": Run(Dynamic, {"max_steps": 12}),
    # DDP never averages what is frozen when it begins
    "changing": Run(Changing, {"max_steps": 10}, oracle="mgwfbp"),
    "checkpointed": Run(partial(Checkpointed, False)),
    "checkpointed reentrant": Run(partial(Checkpointed, True), oracle="mgwfbp"),
    "penalty": Run(Penalty),
    "odd": Run(Odd),
    "images": Run(Images),
    "rows": Run(Rows, defers=False),
    "custom": Run(Custom),
}


def test_no_use_comes_before_the_update() -> None:
    """Whatever a training_step does with parameters."""
    assert_equal_to_oracle(USES)
