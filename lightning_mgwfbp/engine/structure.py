"""`Structure`: which parameters are trained by which optimizers, and whether that has changed.

Users replace layers, cut weights to another shape, add parameters to an optimizer, put another
optimizer or another buffer in the place of one, in the middle of training. A rank sees that by
itself when backward begins, and tells the others in the message of its last bucket; then all of
them compare what they have, and go on with it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mgwfbp.engine.agreement import (
    buffer_facts,
    optimizer_facts,
    parameter_facts,
    require_agreement,
    require_exchangeable,
)
from lightning_mgwfbp.engine.named_buffers import NamedBuffers
from lightning_mgwfbp.exchange.transport import Transport

Named = list[tuple[str, nn.Parameter]]


class Structure:
    """What the ranks have last agreed on, beside what is there now.

    Args:
        named: the model's parameters, the same on all ranks.
        named_parameters: returns them as they are now, in the same order on all ranks.
        optimizers: returns those that step them now.
        buffers: those that ranks give each other, if they do.

    Attributes:
        named: the parameters that were agreed on.
        optimizers: the optimizers that were.
    """

    def __init__(
        self,
        named: Named,
        named_parameters: Callable[[], Named],
        optimizers: Callable[[], Sequence[Optimizer]],
        buffers: NamedBuffers | None = None,
    ) -> None:
        self._named_now = named_parameters
        self._optimizers_now = optimizers
        self._buffers = buffers
        self._remember(named, optimizers())

    def has_changed(self) -> bool:
        """Whether an optimizer or one of its parameters is another than was agreed on, or a
        parameter or buffer has another shape. Takes half a microsecond for each parameter."""
        optimizers = self._optimizers_now()
        return (
            len(optimizers) != len(self.optimizers)
            or any(a is not b for a, b in zip(optimizers, self.optimizers, strict=True))
            or not all(self._known.keys() >= set(map(id, _stepped(o))) for o in optimizers)
            or [p.shape for _, p in self.named] != self._shapes
            or [p.dtype for _, p in self.named] != self._dtypes
            or (self._buffers is not None and self._buffers.have_changed())
        )

    def misfits(self) -> set[str]:
        """Names of the parameters that have another shape or dtype than was agreed on."""
        before = zip(self.named, self._shapes, self._dtypes, strict=True)
        return {n for (n, p), shape, dtype in before if p.shape != shape or p.dtype != dtype}

    def names_now(self, parameters: Iterable[nn.Parameter]) -> list[str | None]:
        """The names of these by now; None for those that the model has no more."""
        names = {id(p): name for name, p in self._named_now()}
        return [names.get(id(p)) for p in parameters]

    def newcomers(self) -> Named:
        """The parameters that were not there when the ranks last agreed."""
        before = {id(p) for _, p in self.named}
        return [(name, p) for name, p in self._named_now() if id(p) not in before]

    def agree(self, transport: Transport) -> frozenset[str]:
        """Agree on what is there now. Collective.

        Returns:
            The names under which there is another parameter than before, or one of another shape.

        Raises:
            RuntimeError: on every rank, naming the first difference between ranks.
            ValueError: on every rank, an optimizer steps a new parameter that is not the model's,
                or ranks cannot send each other a buffer.
        """
        named, optimizers = self._named_now(), self._optimizers_now()
        buffers = [] if self._buffers is None else self._buffers.look()
        misfits, known = self.misfits(), {id(p) for _, p in self.named}
        changed = [name for name, p in named if id(p) not in known or name in misfits]
        replaced = [n for n, o in enumerate(optimizers) if o not in self.optimizers]
        facts = {
            **parameter_facts(named),
            **optimizer_facts(optimizers, named),
            **buffer_facts(buffers),
            # with another of the same shape, or of the same kind, in its place
            "the list of parameters that were replaced": repr(changed),
            "the list of optimizers that were replaced": repr(replaced),
        }
        require_agreement(transport, facts)
        self._require_named(named, optimizers)
        require_exchangeable("Buffer", buffers)
        self._remember(named, optimizers)
        return frozenset(changed)

    def _remember(self, named: Named, optimizers: Sequence[Optimizer]) -> None:
        if self._buffers is not None:
            self._buffers.agree()
        self.named, self.optimizers = list(named), list(optimizers)
        self._shapes = [p.shape for _, p in named]
        self._dtypes: list[torch.dtype] = [p.dtype for _, p in named]
        # by id, and kept alive, lest another one get the same id
        self._known: dict[int, Tensor] = {id(p): p for _, p in named}
        self._known |= {id(p): p for optimizer in optimizers for p in _stepped(optimizer)}

    def _require_named(self, named: Named, optimizers: Sequence[Optimizer]) -> None:
        accepted = self._known.keys() | {id(p) for _, p in named}
        for optimizer in optimizers:
            for number, group in enumerate(optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if id(parameter) not in accepted:
                        raise ValueError(
                            f"{type(optimizer).__name__} steps a parameter that is not the"
                            f" model's: param_groups[{number}]['params'][{place}], of shape"
                            f" {tuple(parameter.shape)}. Its gradient would never be averaged."
                            " Make it an attribute of the module, or of one of its layers."
                        )


def _stepped(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
