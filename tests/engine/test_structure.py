"""A failure here is a parameter or an optimizer that was put in the place of another, unseen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from loopback import on_ranks
from torch import Tensor, nn
from torch.optim import SGD

from lightning_mgwfbp import AlphaBeta, MergedOptimizer, PowerSGD, TopK
from lightning_mgwfbp.engine.structure import Structure
from lightning_mgwfbp.exchange.transport import LoopbackTransport

LINK = AlphaBeta(1e-6, 1e-3)


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    """Ranks are threads here, and share torch's own generator."""
    layer = nn.Linear(inputs, outputs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(0.4 * torch.randn(p.shape, dtype=p.dtype, generator=generator))
    return layer


def network() -> nn.Sequential:
    return nn.Sequential(linear(4, 6, 1), nn.Tanh(), linear(6, 6, 2), nn.Tanh(), linear(6, 2, 3))


def data_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 4, dtype=torch.float64, generator=generator)


def new_head(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """Classes come: the last layer is replaced."""
    net[4] = linear(6, 3, seed)
    optimizer.add_param_group({"params": list(net[4].parameters())})


def longer(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """Layers come."""
    net.append(linear(2, 2, seed))
    optimizer.add_param_group({"params": list(net[5].parameters()), "lr": 0.05})


def pruned(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """The same parameters, of another shape."""
    for p, dim in ((net[2].weight, 0), (net[2].bias, 0), (net[4].weight, 1)):
        p.data = p.data.narrow(dim, 0, 5).clone()
        p.grad = None
    optimizer.state.clear()


def widened(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """The same, with new numbers, which each rank draws for itself."""
    other = linear(6, 7, seed)
    for p, q in zip(net[2].parameters(), other.parameters(), strict=True):
        p.data, p.grad = q.data, None
    net[4].weight.data, net[4].weight.grad = linear(7, 2, seed).weight.data, None
    optimizer.state.clear()


def merged_into(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """A frozen layer gets another name and is thawed, and another one comes under its old name."""
    moved, net[2] = net[2], linear(6, 6, seed)
    net.append(nn.Sequential(linear(2, 6, seed + 1), moved))
    moved.requires_grad_(True)
    new = [*net[2].parameters(), *net[5].parameters()]
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    optimizer.add_param_group({"params": [p for p in new if id(p) not in stepped]})


CHANGES = {"new head": new_head, "longer": longer, "pruned": pruned, "merged into": merged_into}
Change = Callable[[nn.Sequential, Any, int], None]


def train(
    transport: LoopbackTransport,
    change: Change,
    seeds: tuple[int, ...] = (7, 7),
    change_on: tuple[int, ...] = (0, 1),
    **options: Any,
) -> dict[str, Tensor]:
    """Ten steps, of which the sixth comes after the change."""
    net = frozen_at_first(network(), change)
    merged = MergedOptimizer(
        SGD(net.parameters(), lr=0.1, momentum=0.9),
        net.named_parameters(),
        transport=transport,
        module=net,
        link=LINK,
        warmup_steps=2,
        planner="wfbp",
        **options,
    )
    for step in range(10):
        if step == 5 and transport.rank in change_on:
            merged.flush()
            change(net, merged, seeds[transport.rank])
        merged.zero_grad()
        net(data_of(transport.rank, step)).square().mean().backward()
        merged.step()
    merged.close()
    return {name: value.clone() for name, value in net.state_dict().items()}


def frozen_at_first(net: nn.Sequential, change: Change) -> nn.Sequential:
    if change is merged_into:
        net[2].requires_grad_(False)
    return net


def alone(change: Change) -> dict[str, Tensor]:
    """One process that averages by itself."""
    net = frozen_at_first(network(), change)
    optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        if step == 5:
            change(net, optimizer, 7)
        optimizer.zero_grad()
        for rank in range(2):
            (net(data_of(rank, step)).square().mean() / 2).backward()
        optimizer.step()
    return net.state_dict()


@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_comes_later_is_averaged(change: Change, schedule: Any) -> None:
    """A layer that was replaced, added or cut trains on each rank's own gradients, or never."""
    expected = alone(change)
    for state in on_ranks(partial(train, change=change, schedule=schedule)):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
@pytest.mark.parametrize("change", [new_head, longer, widened])
def test_rank_0s_values_win(change: Change, schedule: Any) -> None:
    """What each rank has drawn for itself stays as it is, and the ranks drift apart."""
    first, second = on_ranks(partial(train, change=change, seeds=(7, 8), schedule=schedule))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_under_a_compressor(change: Change) -> None:
    """A residual of the parameter that was there before is added to its successor's gradient."""
    compressor = TopK(density=0.1, dense_below_numel=0)
    first, second = on_ranks(partial(train, change=change, seeds=(7, 8), compressor=compressor))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def alike(net: nn.Sequential, optimizer: Any, seed: int) -> None:
    """Another parameter of the same name and shape."""
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())
    optimizer.add_param_group({"params": [net[2].weight]})


@pytest.mark.parametrize("change", [new_head, longer, pruned, alike])
def test_of_one_rank_only(change: Change) -> None:
    """The ranks exchange what does not belong together, or one of them waits for the others."""
    names = {new_head: "4.weight", longer: "number of", pruned: "2.weight", alike: "param_groups"}
    with pytest.raises(RuntimeError, match=f"The ranks disagree: .*{names[change]}"):
        on_ranks(partial(train, change=change, change_on=(1,)))


def test_an_optimizer_replaced_on_one_rank_only() -> None:
    """Its state is gone there, and the ranks' weights part."""
    net = network()
    optimizers = [SGD(net.parameters(), lr=0.1)]

    def agree(transport: LoopbackTransport) -> None:
        ours = list(optimizers)
        named = list(net.named_parameters())
        structure = Structure(named, lambda: named, lambda: ours)
        if transport.rank == 1:
            ours[0] = SGD(net.parameters(), lr=0.1)
        structure.agree(transport)

    with pytest.raises(RuntimeError, match="the list of optimizers that were replaced is"):
        on_ranks(agree)


def test_residuals_of_what_is_gone() -> None:
    """A checkpoint names parameters that the model has no more, and cannot be resumed."""

    def run(transport: LoopbackTransport) -> Any:
        net = network()
        merged = MergedOptimizer(
            SGD(net.parameters(), lr=0.1),
            net.named_parameters(),
            transport=transport,
            module=net,
            link=LINK,
            warmup_steps=2,
            compressor=PowerSGD(rank=1, dense_below_numel=0),
        )
        for step in range(6):
            if step == 3:
                del net[4], net[3]
                net.add_module("head", linear(6, 2, 7))
                merged.add_param_group({"params": list(net.head.parameters())})
            merged.zero_grad()
            net(data_of(transport.rank, step)).square().mean().backward()
            merged.step()
        left = merged.reducer.exchanger.state_dict()["residual"]
        merged.close()
        return set(left) - {name for name, _ in net.named_parameters()}

    assert on_ranks(run) == [set(), set()]


def test_a_parameter_that_is_not_the_models() -> None:
    """Its gradient is never averaged, and nobody hears of it."""

    def stray(net: nn.Sequential, optimizer: Any, seed: int) -> None:
        hidden = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        net[4].register_forward_hook(lambda _, __, output: output + hidden)
        optimizer.optimizer.add_param_group({"params": [hidden]})

    named = r"param_groups\[1\]\['params'\]\[0\], of shape \(2,\)"
    with pytest.raises(ValueError, match=f"SGD steps a parameter that is not the model's: {named}"):
        on_ranks(train, stray)


def test_without_a_module_nobody_knows_its_name() -> None:
    """`add_param_group` takes what would never be averaged."""
    net = network()
    merged = MergedOptimizer(
        SGD(net.parameters(), lr=0.1),
        net.named_parameters(),
        transport=LoopbackTransport.solo(),
        link=LINK,
    )
    with pytest.raises(ValueError, match="give `module=model` too"):
        new_head(net, merged, 7)
    merged.close()


def test_has_changed() -> None:
    """A change goes unseen, or something is taken for one at every step."""
    net = network()
    optimizers = [SGD(net.parameters(), lr=0.1)]
    named = list(net.named_parameters())
    structure = Structure(named, lambda: list(net.named_parameters()), lambda: optimizers)
    assert not structure.has_changed()
    net[0].weight.grad = torch.zeros_like(net[0].weight)
    net[0].weight.requires_grad_(False)
    optimizers[0].param_groups[0]["lr"] = 1.0
    net[0].weight.data = net[0].weight.data.clone()
    assert not structure.has_changed()
    optimizers[0] = copy.copy(optimizers[0])
    assert structure.has_changed()
    assert structure.agree(LoopbackTransport.solo()) == frozenset()
    assert not structure.has_changed()
    pruned(net, optimizers[0], 7)
    assert structure.has_changed()
    changed = {"2.weight", "2.bias", "4.weight"}
    assert structure.misfits() == changed == structure.agree(LoopbackTransport.solo())
    assert not structure.has_changed()
    new_head(net, optimizers[0], 7)
    assert structure.has_changed()
    assert [name for name, _ in structure.newcomers()] == ["4.weight", "4.bias"]
    assert structure.agree(LoopbackTransport.solo()) == {"4.weight", "4.bias"}
    assert not structure.has_changed()
