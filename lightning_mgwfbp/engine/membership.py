"""Which parameters take part in the exchange: hooked, frozen, joining, leaving.

[Note: others' hooks] A post-accumulate hook of the user's own, such as a mask on gradients, must
run before a gradient is taken, whenever it was registered. Hooks run in the order of registration.
So where another one comes behind ours, ours is moved to the end, which counts from the next
backward on, and the gradient is counted one hook later. (A hook on the AccumulateGrad node would
always come last. But whoever holds that node keeps the shape, dtype and device of the parameter as
they were: with another tensor in `.data` backward would fail, or lose the hook.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_mgwfbp.engine.layout import Layout

# A parameter that is frozen for so many exchanges in a row leaves the plan. Large, because models
# with several optimizers freeze and unfreeze each other's parameters within each step.
_EXCHANGES_UNTIL_FROZEN_LEAVE = 100


class _Announcement(partial[None]):
    """The hook of one parameter: a partial, which costs less than a method in Python, by which it
    is known that somebody exchanges the parameter."""


def require_unexchanged(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that somebody exchanges already.

    Raises:
        ValueError: naming the first one.
    """
    for name, parameter in named_parameters:
        hooks = parameter._post_accumulate_grad_hooks or {}
        if any(isinstance(hook, _Announcement) for hook in hooks.values()):
            raise ValueError(
                f"Parameter {name!r} is exchanged already, by another MergedOptimizer or by a"
                " Trainer's strategy: its gradients would be averaged twice. close() the other"
                " MergedOptimizer first, or give each its own parameters."
            )


class Membership:
    """Keeps the planned, trainable parameters hooked, and notices when the plan no longer fits.

    Args:
        parameters: all of the model's, (N,).
        on_gradient: called as on_gradient(index, parameter) after each accumulation; not under
            torch.autograd.grad, as a hook on the tensor itself would be.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], on_gradient: Callable[[int, Tensor], None]
    ) -> None:
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._hooks: dict[int, RemovableHandle] = {}
        self._frozen: list[int] = []
        self._frozen_for = 0

    def adopt(self, layout: Layout) -> None:
        """Take the parameters of `layout` for the planned ones."""
        self._planned = [i for part in layout.members for i in part]
        self._unplanned = layout.unplanned
        self._unhooked = [i for i in self._planned if i not in self._hooks]
        self.hook_unfrozen()

    def hook_unfrozen(self) -> list[int]:
        """Hook planned parameters that were frozen so far; return which."""
        unfrozen = [i for i in self._unhooked if self._parameters[i].requires_grad]
        for i in unfrozen:
            self._hooks[i] = self._parameters[i].register_post_accumulate_grad_hook(
                _Announcement(self._on_gradient, i)
            )
            self._unhooked.remove(i)
        return unfrozen

    def is_followed(self, i: int) -> bool:
        """Whether another hook comes behind ours, which is called now: [Note: others' hooks]."""
        hooks = cast(OrderedDict[int, Any], self._parameters[i]._post_accumulate_grad_hooks)
        ours = self._hooks[i].id
        if next(reversed(hooks), ours) == ours:
            return False
        # Autograd has made a list of those that it is calling now. It goes by the order of a dict,
        # which OrderedDict.move_to_end leaves as it is.
        hooks[ours] = hooks.pop(ours)
        return True

    def changed(self) -> bool:
        """Whether a parameter wants to join, or has been frozen for long enough to leave.

        To be asked once per exchange.
        """
        frozen = [i for i in self._planned if not self._parameters[i].requires_grad]
        self._frozen_for = self._frozen_for + 1 if frozen and frozen == self._frozen else 0
        self._frozen = frozen
        return bool(self.joining()) or self._frozen_for >= _EXCHANGES_UNTIL_FROZEN_LEAVE

    def joining(self) -> list[int]:
        """The unplanned parameters that are trainable now."""
        return [i for i in self._unplanned if self._parameters[i].requires_grad]

    def unseen(self) -> list[int]:
        """The trainable parameters that no hook is on, having been frozen so far."""
        unhooked = (i for i in (*self._unhooked, *self._unplanned) if i not in self._hooks)
        return [i for i in unhooked if self._parameters[i].requires_grad]

    def staying(self) -> list[int]:
        """The planned parameters but for those frozen for long, whose count begins anew."""
        leaving = self._frozen if self._frozen_for >= _EXCHANGES_UNTIL_FROZEN_LEAVE else []
        self._frozen_for = 0
        # a plan has at least one parameter, and its messages carry the notice to unfreeze
        return [i for i in self._planned if i not in leaving] or self._planned

    def close(self) -> None:
        """Remove all hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
