"""A failure here is an optimizer whose state or options stay different on the ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from lightning_mgwfbp.exchange.broadcast import broadcast_optimizer_state
from lightning_mgwfbp.exchange.transport import LoopbackTransport

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.01)


def model(seed: int = 0) -> nn.Module:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return module


def train(module: nn.Module, optimizer: Optimizer, steps: int, seed: int) -> None:
    data = torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = module(data).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)


def same_tree(ours: Any, theirs: Any) -> bool:
    ours, our_structure = pytree.tree_flatten(ours)
    theirs, their_structure = pytree.tree_flatten(theirs)
    return our_structure == their_structure and all(
        same_bits(a, b) if isinstance(a, Tensor) else type(a) is type(b) and a == b
        for a, b in zip(ours, theirs, strict=True)
    )


def differ_then_broadcast(
    transport: LoopbackTransport, name: str, steps: list[int], root: int, push_pull: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Each rank its own number of steps on its own data; state after, and after one more step."""
    module = model(seed=transport.rank)
    optimizer = OPTIMIZERS[name](module.parameters())
    train(module, optimizer, steps[transport.rank], seed=transport.rank)
    optimizer.param_groups[0]["weight_decay"] = 0.5 * transport.rank
    before = copy.deepcopy(optimizer.state_dict())
    broadcast_optimizer_state(optimizer, root, transport=transport, push_pull=push_pull)
    after = copy.deepcopy(optimizer.state_dict())
    module.load_state_dict(model(seed=5).state_dict())
    train(module, optimizer, 1, seed=7)
    return before, {"state": after, "weights": list(module.parameters()), "root": root}


@pytest.mark.parametrize("push_pull", [False, True], ids=["broadcast", "push-pull"])
@pytest.mark.parametrize("steps", [[3, 1], [2, 0], [0, 2]], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_and_options_are_the_roots(name: str, steps: list[int], push_pull: bool) -> None:
    """State of one kind of optimizer, or a rank that had none, or more than the root."""
    for root in (0, 1):
        (first, ours), (second, theirs) = on_ranks(
            differ_then_broadcast, name, steps, root, push_pull
        )
        assert not same_tree(first, second)
        assert same_tree(ours["state"], (first, second)[root])
        assert same_tree(theirs["state"], (first, second)[root])
        assert same_tree(ours["weights"], theirs["weights"])  # it also steps alike


def wide_state(transport: LoopbackTransport) -> dict[str, Any]:
    module = model().bfloat16()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for p in module.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.full(p.shape, 1 / 3 + transport.rank)
    broadcast_optimizer_state(optimizer, 0, transport=transport)
    return copy.deepcopy(optimizer.state_dict())


def test_the_states_own_dtype_is_kept() -> None:
    """float32 state of bfloat16 parameters is rounded to theirs."""
    for state_dict in on_ranks(wide_state):
        for state in state_dict["state"].values():
            buffer = state["momentum_buffer"]
            assert same_bits(buffer, torch.full(buffer.shape, 1 / 3))


def two_param_groups(transport: LoopbackTransport) -> list[float]:
    first, second = model().parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.1)
    optimizer.param_groups[1]["lr"] += transport.rank
    broadcast_optimizer_state(optimizer, 1, transport=transport)
    assert optimizer.param_groups[0]["params"][0] is first
    assert optimizer.param_groups[1]["params"][0] is second
    return [g["lr"] for g in optimizer.param_groups]


def test_options_of_each_param_group() -> None:
    """Options land in another param_group, or the parameters are swapped for copies."""
    assert on_ranks(two_param_groups) == [[0.1, 1.5]] * 2


def _over_gloo(rank: int) -> dict[str, Any]:
    module = model()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, steps=3 * (1 - rank), seed=rank)
    broadcast_optimizer_state(optimizer)
    return optimizer.state_dict()


def test_on_real_processes() -> None:
    """Pickling the description: threads share it, processes do not."""
    ours, theirs = run_ranks(_over_gloo)
    assert same_tree(ours, theirs)
    assert int(ours["state"][0]["step"]) == 3
