"""A failure here is a parameter that takes part in the exchange without being asked, or not."""

import torch
from engine_examples import Layers, backward, data_of
from torch import Tensor, nn

from lightning_mgwfbp.engine import membership as module_under_test
from lightning_mgwfbp.engine.layout import Layout
from lightning_mgwfbp.engine.membership import Membership
from lightning_mgwfbp.plan import MergePlan

LIMIT = module_under_test._EXCHANGES_UNTIL_FROZEN_LEAVE
NAMES, _ = zip(*Layers().named_parameters(), strict=True)


class Exchanged:
    """A model whose last layer is not planned; what fired, by index."""

    def __init__(self) -> None:
        self.model = Layers()
        self.parameters = list(self.model.parameters())
        self.fired: list[int] = []
        self.membership = Membership(self.parameters, self.on_gradient)
        self.model.layers[2].requires_grad_(False)
        self.membership.adopt(Layout(MergePlan(NAMES[:4], ((0, 4),)), NAMES, self.parameters))

    def on_gradient(self, i: int, _: Tensor) -> None:
        self.fired.append(i)

    def backward(self) -> list[int]:
        self.fired.clear()
        backward(self.model, data_of(0))
        return sorted(self.fired)


def test_planned_parameters_are_hooked_once() -> None:
    """A parameter fires twice, not at all, or with another's index."""
    exchanged = Exchanged()
    assert exchanged.backward() == [0, 1, 2, 3]
    exchanged.membership.adopt(
        Layout(MergePlan(NAMES[:4], ((0, 2), (2, 4))), NAMES, exchanged.parameters)
    )
    assert exchanged.backward() == [0, 1, 2, 3]
    exchanged.membership.close()
    assert exchanged.backward() == []


def test_joining() -> None:
    """An unfrozen parameter that no plan names goes unnoticed."""
    exchanged = Exchanged()
    assert not exchanged.membership.changed()
    exchanged.parameters[5].requires_grad_(True)
    assert exchanged.membership.changed()
    assert exchanged.membership.joining() == [5]
    assert exchanged.membership.staying() == [0, 1, 2, 3]


def test_planned_but_frozen_at_first_is_hooked_when_unfrozen() -> None:
    """A parameter that a saved plan names, but that is frozen as yet, never fires."""
    exchanged = Exchanged()
    exchanged.membership.adopt(Layout(MergePlan(NAMES, ((0, 6),)), NAMES, exchanged.parameters))
    assert exchanged.backward() == [0, 1, 2, 3]
    assert exchanged.membership.hook_unfrozen() == []
    exchanged.model.layers[2].requires_grad_(True)
    assert exchanged.membership.hook_unfrozen() == [4, 5]
    assert exchanged.membership.hook_unfrozen() == []
    assert exchanged.backward() == [0, 1, 2, 3, 4, 5]


def ask(membership: Membership, times: int) -> list[bool]:
    return [membership.changed() for _ in range(times)]


def freeze(layer: nn.Module, frozen: bool = True) -> None:
    layer.requires_grad_(not frozen)


def test_frozen_for_long_means_leaving() -> None:
    """A frozen parameter leaves too early, or stays for ever; its count begins anew each time."""
    exchanged = Exchanged()
    freeze(exchanged.model.layers[0])
    # the first time only finds that it is frozen
    assert ask(exchanged.membership, LIMIT + 1) == [False] * LIMIT + [True]
    assert exchanged.membership.staying() == [2, 3]
    assert ask(exchanged.membership, LIMIT) == [False] * (LIMIT - 1) + [True]


def test_another_set_of_frozen_parameters_counts_anew() -> None:
    """Two optimizers that freeze each other's parameters in turn empty the plan."""
    exchanged = Exchanged()
    for turn in range(2 * LIMIT + 2):
        freeze(exchanged.model.layers[0], turn % 2 == 0)
        freeze(exchanged.model.layers[1], turn % 2 == 1)
        assert not exchanged.membership.changed()
    assert exchanged.membership.staying() == [0, 1, 2, 3]


class Asked(Exchanged):
    """The same, with a call before each accumulation: `grad` is then what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.membership.close()
        self.before: list[tuple[int, bool]] = []
        self.membership = Membership(self.parameters, self.on_gradient, self.before_gradient)
        self.membership.adopt(Layout(MergePlan(NAMES[:4], ((0, 4),)), NAMES, self.parameters))

    def before_gradient(self, i: int) -> None:
        assert i not in self.fired
        self.before.append((i, self.parameters[i].grad is None))


def test_each_accumulation_is_announced() -> None:
    """An average is added to before it could be set aside, or after a regrouping twice."""
    exchanged = Asked()
    for is_first in (True, False):
        assert exchanged.backward() == [0, 1, 2, 3]
        assert sorted(exchanged.before) == [(i, is_first) for i in range(4)]
        exchanged.before.clear()
        exchanged.membership.adopt(
            Layout(MergePlan(NAMES[:4], ((0, 2), (2, 4))), NAMES, exchanged.parameters)
        )
    exchanged.membership.close()
    assert exchanged.backward() == []
    assert exchanged.before == []


def test_gradients_that_are_not_accumulated_are_not_announced() -> None:
    """torch.autograd.grad (a gradient penalty) sets averages aside that nobody adds to."""
    exchanged = Asked()
    loss = exchanged.model(data_of(0), (0, 1))
    torch.autograd.grad(loss, exchanged.parameters[:4])
    assert exchanged.before == []


def test_who_is_unfrozen_is_announced() -> None:
    """A parameter that was frozen at first, or for a while, adds to its average unseen."""
    exchanged = Asked()
    exchanged.membership.adopt(Layout(MergePlan(NAMES, ((0, 6),)), NAMES, exchanged.parameters))
    exchanged.model.layers[2].requires_grad_(True)
    exchanged.membership.hook_unfrozen()
    for frozen in (True, False):
        freeze(exchanged.model.layers[0], frozen)
        exchanged.backward()
        assert {i for i, _ in exchanged.before} == ({2, 3, 4, 5} if frozen else set(range(6)))
        exchanged.before.clear()
