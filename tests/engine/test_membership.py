"""A failure here is a parameter that takes part in the exchange without being asked, or not."""

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


def test_hooks_of_others_come_first() -> None:
    """A gradient is taken before a mask that was registered later has been applied."""
    exchanged = Exchanged()
    followed: list[tuple[int, bool]] = []

    def on_gradient(i: int, _: Tensor) -> None:
        followed.append((i, exchanged.membership.is_followed(i)))

    exchanged.on_gradient = on_gradient  # type: ignore[method-assign]
    exchanged.membership.close()
    exchanged.membership = Membership(exchanged.parameters, on_gradient)
    exchanged.membership.adopt(Layout(MergePlan(NAMES[:4], ((0, 4),)), NAMES, exchanged.parameters))
    ours_came_first: list[bool] = []
    handles = [
        exchanged.parameters[1].register_post_accumulate_grad_hook(
            lambda _: ours_came_first.append(1 in dict(followed))
        )
        for _ in range(2)
    ]
    for expected in (True, False, False):
        followed.clear()
        ours_came_first.clear()
        exchanged.backward()
        assert dict(followed) == {0: False, 1: expected, 2: False, 3: False}
        assert ours_came_first == [expected] * 2
    handles[0].remove()
    assert not exchanged.membership.is_followed(1)


def test_unseen_are_those_that_no_hook_is_on() -> None:
    """A gradient of a parameter that was unfrozen is not exchanged before the next step."""
    exchanged = Exchanged()
    assert exchanged.membership.unseen() == []
    exchanged.model.layers[2].requires_grad_(True)
    assert exchanged.membership.unseen() == [4, 5]
