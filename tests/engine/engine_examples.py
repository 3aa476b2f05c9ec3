"""Small models whose loss may use any of their layers in any order, and their plain gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.engine.structure import Structure
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.plan import AlphaBeta, MergePlan

ALL = (0, 1, 2)
Gradients = dict[str, Tensor | None]


class Layers(nn.Module):
    """Independent linear layers; backward yields their gradients in the reverse of `used`."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 2, dtype=torch.float64) for _ in range(count))
        generator = torch.Generator().manual_seed(count)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator))

    def forward(self, data: Tensor, used: Sequence[int]) -> Tensor:
        return torch.stack([self.layers[i](data).square().mean() for i in used]).sum()


def lasting(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Structure:
    """One that nobody changes."""
    named = list(named_parameters)
    return Structure(named, lambda: named, list)


def data_of(*seeds: int) -> Tensor:
    seed = sum(s * 101**place for place, s in enumerate(seeds))
    return torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def backward(model: Layers, data: Tensor, used: Sequence[int] = ALL) -> None:
    """As one micro-batch of training; a loss that needs no parameter has no backward."""
    if used:
        model(data, used).backward()


def gradients(model: nn.Module) -> Gradients:
    """Clones, so that nothing is held."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def plain(model: Layers, *micro_batches: tuple[Tensor, Sequence[int]]) -> Gradients:
    """What one process alone accumulates over the micro-batches."""
    alone = copy.deepcopy(model)
    for p in alone.parameters():
        p.requires_grad_(True)
        p.grad = None
    for data, used in micro_batches:
        backward(alone, data, used)
    return gradients(alone)


def mean(ranks: Sequence[Gradients]) -> Gradients:
    """Over all ranks, a missing gradient counting as zeros; None where all are missing."""
    result: Gradients = {}
    for name in ranks[0]:
        present = [r[name] for r in ranks if r[name] is not None]
        result[name] = sum(present) / len(ranks) if present else None
    return result


def plus(ours: Gradients, theirs: Gradients) -> Gradients:
    return {
        n: theirs[n] if g is None else g if theirs[n] is None else g + theirs[n]
        for n, g in ours.items()
    }


def assert_close(ours: Gradients, theirs: Gradients) -> None:
    """To the rounding of float64, and None where the other is None."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if value is None or theirs[name] is None:
            assert value is theirs[name], f"{name}: {value} but {theirs[name]}"
        else:
            torch.testing.assert_close(value, theirs[name], rtol=1e-12, atol=1e-14)


def averages(model: Layers, seed: int, used: Sequence[int] = ALL) -> Gradients:
    """Of two ranks that each `step` once with `seed`."""
    return mean([plain(model, (data_of(rank, seed), used)) for rank in range(2)])


def plan_of(model: nn.Module, *sizes: int) -> MergePlan:
    """Trainable parameters in reverse order of registration, in groups of `sizes`."""
    names = [n for n, p in model.named_parameters() if p.requires_grad][::-1]
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return MergePlan(tuple(names), tuple(pairwise(bounds)))


def reducer_of(
    model: nn.Module, transport: LoopbackTransport, *sizes: int, **options: Any
) -> Reducer:
    """A reducer whose plan, groups of `sizes`, is in force from the first backward on."""
    reducer = Reducer(lasting(model.named_parameters()), DenseExchanger(transport), **options)
    if sizes:
        reducer.install(plan_of(model, *sizes))
    return reducer


def step(model: Layers, reducer: Reducer, rank: int, seed: int, used: Sequence[int] = ALL) -> None:
    """One backward on this rank's data, and one exchange."""
    backward(model, data_of(rank, seed), used)
    reducer.synchronize()


def merge(
    model: nn.Module,
    transport: LoopbackTransport | None = None,
    optimizer: Callable[..., Optimizer] = SGD,
    **options: Any,
) -> MergedOptimizer:
    """A wrapper around `optimizer(**options)` that plans after two steps."""
    return MergedOptimizer(
        optimizer(model.parameters(), **options),
        model.named_parameters(),
        transport=transport or LoopbackTransport.solo(),
        link=AlphaBeta(1e-3, 1e-9),
        warmup_steps=2,
    )
