"""`ExchangedParameters`: the parameters of a model, and what the reducer keeps of each of them.

They may be others in the middle of training, and the plan may be another one; what depends on
either lies here, so that it is made anew together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from lightning_mgwfbp.engine.amendment import Amendment
from lightning_mgwfbp.engine.layout import Layout, adapted_plan, provisional_plan
from lightning_mgwfbp.engine.ledger import GradientLedger
from lightning_mgwfbp.engine.membership import Membership
from lightning_mgwfbp.engine.readiness import Readiness
from lightning_mgwfbp.engine.structure import Named, Structure
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.exchangers import Exchanger
from lightning_mgwfbp.plan import MergePlan


class ExchangedParameters:
    """All parameters of a model, by index, in the order of `names`.

    Args:
        structure: knows them.
        exchanger: averages their gradients.
        on_gradient: see `Membership`.

    Attributes:
        names, parameters: (N,).
        ledger: what is in `.grad`.
        membership: their hooks.
        readiness: how often each is ready in a backward.
        layout: the buckets of the plan in force.
        version: how often some have joined, left or changed.
        on_replaced: told all of them where the model has others than before.

    Raises:
        ValueError: no parameter is trainable.
    """

    def __init__(
        self,
        structure: Structure,
        exchanger: Exchanger,
        on_gradient: Callable[[int, Tensor], None],
    ) -> None:
        self._structure = structure
        self._exchanger = exchanger
        self._on_gradient = on_gradient
        self.version = 0
        self._names_now: Sequence[str | None] = ()  # while the ranks have not agreed on them
        self.on_replaced: Callable[[Named], None] | None = None
        self._take()
        trainable = {name for name, p in structure.named if p.requires_grad}
        if not trainable:
            raise ValueError(
                "The model has no trainable parameter (requires_grad=True): nothing to exchange."
                " Unfreeze a parameter, or train on one device without this strategy."
            )
        self.lay_out(provisional_plan(self.names, self.parameters, trainable), rowwise=())

    @property
    def rowwise(self) -> list[str]:
        """Names of those whose gradients are known to be sparse."""
        return [self.names[i] for i in sorted(self.layout.rowwise)]

    @property
    def members(self) -> list[str]:
        """Names of those that should take part in the next exchange, as this rank sees it."""
        members = self.membership.staying() + self.membership.joining()
        return [name for i in members if (name := self._names_now[i]) is not None]

    def by_name(self, parts: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """`parts`, by index, under the names that the parameters have by now."""
        named = ((self._names_now[i], part) for i, part in parts.items())
        return {name: part for name, part in named if name is not None}

    def note_changes(self) -> set[int]:
        """Learn other names from a structure that has changed; return those parameters that do not
        have the shape any more for which their bucket was made."""
        self._names_now = self._structure.names_now(self.parameters)
        misfits = self._structure.misfits()
        return {i for i, name in enumerate(self.names) if name in misfits}

    def expected(self) -> list[list[int]]:
        """Those of each bucket that can have a gradient, (B,) of lists."""
        return [
            [i for i in members if self.parameters[i].requires_grad]
            for members in self.layout.members
        ]

    def new_gradients(self) -> list[Tensor]:
        """What this rank is about to contribute, but for sparse gradients."""
        new = [p.grad for i, p in enumerate(self.parameters) if self.ledger.is_new(i)]
        return [g for g in new if g is not None and not g.is_sparse]

    def lay_out(self, plan: MergePlan, rowwise: Collection[str]) -> None:
        """Exchange by `plan` from the next exchange on.

        Args:
            rowwise: names of those whose gradients are sparse.
        """
        indices = [i for i, name in enumerate(self.names) if name in rowwise]
        compresses = self._exchanger.compresses
        self.layout = Layout(plan, self.names, self.parameters, compresses, indices)
        self.membership.adopt(self.layout)
        self._exchanger.adopt(self.layout.buckets, self.layout.pieces, self.layout.gather_order)

    def adapt(self, amendment: Amendment) -> bool:
        """Follow what the ranks have agreed on; return whether there is another plan."""
        replaced = list(map(id, self.parameters)) != [id(p) for _, p in self._structure.named]
        if replaced or amendment.changed:
            self._replace(amendment.changed)
        plan = self.layout.plan
        joined_or_left = amendment.members != set(plan.names) or bool(amendment.changed)
        self.version += joined_or_left
        is_another = replaced or joined_or_left or amendment.rowwise != set(self.rowwise)
        if is_another:
            adapted = adapted_plan(plan, self.names, self.parameters, amendment.members)
            self.lay_out(adapted, amendment.rowwise)
        return is_another

    def add_back(self, kept: Collection[str] | None) -> None:
        """Add averages that were set aside, all or those of the parameters named."""
        self.ledger.add_back(lambda i: kept is None or self._names_now[i] in kept)

    def put_late(self, averages: Mapping[str, Tensor]) -> None:
        """Add averages of what no bucket carried to what is in `.grad`."""
        for name, average in averages.items():
            self.ledger.add(self.names.index(name), average)

    def _take(self) -> None:
        named = dict(self._structure.named)
        self.names, self.parameters = tuple(named), tuple(named.values())
        self._names_now = self.names
        self.readiness = Readiness(len(named))
        sets_aside = self._exchanger.keeps_residuals
        self.ledger = GradientLedger(self.parameters, sets_aside=sets_aside)
        self.membership = Membership(self.parameters, self._on_gradient)

    def _replace(self, changed: Collection[str]) -> None:
        """Go on with others than before, of which all ranks get rank 0's values."""
        named = self._structure.named
        gone = set(self.names) - {name for name, _ in named}
        self._exchanger.forget(gone.union(changed))
        self.membership.close()
        weight = self.ledger.weight
        self._take()
        self.ledger.weight = weight
        values = [p for name, p in named if name in changed]
        broadcast_tensors(values, 0, self._exchanger.transport)
        if self.on_replaced is not None:
            self.on_replaced(named)
