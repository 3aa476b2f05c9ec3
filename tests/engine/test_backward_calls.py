"""A failure here means: averages come too late, or too often, for a backward of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_mgwfbp.engine.backward_calls import BackwardCalls


def by_tensor(loss: Tensor, _: nn.Module) -> None:
    loss.backward()


def by_autograd(loss: Tensor, _: nn.Module) -> None:
    torch.autograd.backward([loss])


def by_both(loss: Tensor, _: nn.Module) -> None:
    loss.backward(retain_graph=True)
    torch.autograd.backward(loss)


def by_grad(loss: Tensor, model: nn.Module) -> None:
    torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize(
    ("backward", "calls"), [(by_tensor, 1), (by_autograd, 1), (by_both, 2), (by_grad, 0)]
)
def test_calls_that_leave_gradients(
    backward: Callable[[Tensor, nn.Module], None], calls: int
) -> None:
    """One that is not seen, one that is taken for two, or one of the backward itself."""
    model = nn.Linear(2, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = checkpoint(model, x, use_reentrant=True) if calls else model(x)
    seen: list[Tensor] = []

    @contextmanager
    def around() -> Iterator[None]:
        yield
        seen.append(model.weight.grad.clone())

    with BackwardCalls(around) as counted:
        backward(loss.sum(), model)
    assert counted.count == len(seen) == calls
    for number, gradient in enumerate(seen, start=1):
        assert torch.equal(gradient, torch.full((2, 2), float(number)))


def test_a_failed_call_has_left_none() -> None:
    """An exchange on one rank of what a failed backward has left."""
    loss = nn.Linear(2, 2)(torch.ones(2)).sum()
    loss.backward()

    @contextmanager
    def around() -> Iterator[None]:
        yield
        pytest.fail("ended well")

    with BackwardCalls(around) as counted, pytest.raises(RuntimeError):
        loss.backward()
    assert counted.count == 0
