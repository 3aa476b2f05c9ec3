"""A failure here is a hook that fires without a gradient, or that travels with copies."""

import copy
import pickle

import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.hooks import GradientHooks


class Watch:
    """What the two hooks of one parameter saw, in order."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.seen: list[tuple[str, list[float] | None]] = []
        self.hooks = GradientHooks(parameter, self.before, self.after)

    def note(self, which: str) -> None:
        gradient = self.parameter.grad
        self.seen.append((which, None if gradient is None else gradient.tolist()))

    def before(self, _: object) -> None:
        self.note("before")

    def after(self, _: Tensor) -> None:
        self.note("after")


def test_before_and_after_each_accumulation() -> None:
    """An average is set aside too late, or a gradient is taken before it is complete."""
    p = nn.Parameter(torch.ones(1))
    watch = Watch(p)
    (2 * p).sum().backward()
    (3 * p).sum().backward()
    assert watch.seen == [("before", None), ("after", [2.0]), ("before", [2.0]), ("after", [5.0])]


def test_one_firing_for_several_uses_in_one_graph() -> None:
    """A parameter used twice in a forward counts as two gradients."""
    p = nn.Parameter(torch.ones(1))
    watch = Watch(p)
    (2 * p + 5 * p).sum().backward()
    assert watch.seen == [("before", None), ("after", [7.0])]


def test_autograd_grad_fires_nothing() -> None:
    """A gradient penalty in the forward is exchanged as if it were backward."""
    p = nn.Parameter(torch.ones(1))
    watch = Watch(p)
    torch.autograd.grad((2 * p).sum(), p)
    assert watch.seen == []


def test_hooks_can_be_made_without_grad_mode() -> None:
    """Hooks are made within no_grad, and never fire."""
    p = nn.Parameter(torch.ones(1))
    with torch.no_grad():
        watch = Watch(p)
    p.sum().backward()
    assert len(watch.seen) == 2


def test_remove() -> None:
    """One of the two stays behind."""
    p = nn.Parameter(torch.ones(1))
    watch = Watch(p)
    watch.hooks.remove()
    p.sum().backward()
    assert watch.seen == []


def test_copies_and_pickles_carry_no_hooks() -> None:
    """A copy for EMA, or a checkpoint of the whole module, takes part in the exchange."""
    module = nn.Linear(2, 1)
    watches = [Watch(p) for p in module.parameters()]
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        other(torch.ones(1, 2)).sum().backward()
        assert all(p.grad is not None for p in other.parameters())
    assert all(watch.seen == [] and watch.parameter.grad is None for watch in watches)
