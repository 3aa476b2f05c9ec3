"""Which parameters take part in the exchange: hooked, frozen, joining, leaving."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
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
        before_gradient: called as before_gradient(index) before each accumulation, likewise.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        on_gradient: Callable[[int, Tensor], None],
        before_gradient: Callable[[int], None] | None = None,
    ) -> None:
        self._parameters = parameters
        self._on_gradient = on_gradient
        self._before_gradient = before_gradient
        self._hooks: dict[int, RemovableHandle] = {}
        self._nodes: dict[int, Node] = {}  # which a parameter does not keep alive itself
        self._prehooks: list[RemovableHandle] = []
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
            if self._before_gradient is not None and i not in self._nodes:
                self._nodes[i] = _accumulating_node(self._parameters[i])
                before = partial(_ignoring_gradients, self._before_gradient, i)
                self._prehooks.append(self._nodes[i].register_prehook(before))
        return unfrozen

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

    def has_unseen(self) -> bool:
        """Whether a parameter that was frozen so far has a gradient, which no hook has seen."""
        unhooked = (i for i in (*self._unhooked, *self._unplanned) if i not in self._hooks)
        parameters = (self._parameters[i] for i in unhooked)
        return any(p.requires_grad and p.grad is not None for p in parameters)

    def staying(self) -> list[int]:
        """The planned parameters but for those frozen for long, whose count begins anew."""
        leaving = self._frozen if self._frozen_for >= _EXCHANGES_UNTIL_FROZEN_LEAVE else []
        self._frozen_for = 0
        # a plan has at least one parameter, and its messages carry the notice to unfreeze
        return [i for i in self._planned if i not in leaving] or self._planned

    def close(self) -> None:
        """Remove all hooks."""
        for hook in [*self._hooks.values(), *self._prehooks]:
            hook.remove()
        self._hooks.clear()
        self._prehooks.clear()
        self._nodes.clear()


def _accumulating_node(parameter: nn.Parameter) -> Node:
    """The node of the graph that adds to `.grad`; the same for every graph."""
    with torch.enable_grad():
        view = parameter.view_as(parameter)
    assert view.grad_fn is not None
    node = view.grad_fn.next_functions[0][0]
    assert node is not None
    return node


def _ignoring_gradients(before: Callable[[int], None], i: int, _: tuple[Tensor, ...]) -> None:
    before(i)
