"""A failure here means: a graph that runs twice, or has a graph of its own, is not as under DDP."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from cross_traps import Layers
from kinds import BY_HAND, Kind, assert_equal_to_oracle
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow


class Penalised(Layers):
    """Gradients of gradients, to the second and the third order."""

    def __init__(self, order: int) -> None:
        super().__init__()
        self.order = order

    def loss(self, x: Tensor, step: int) -> Tensor:
        loss = super().loss(x, step)
        wanted = [self.a.weight, self.c.bias]
        penalty = loss
        for _ in range(self.order - 1):
            gradients = torch.autograd.grad(penalty, wanted, create_graph=True)
            penalty = torch.stack([g.square().sum() for g in gradients]).sum()
        return loss + penalty


class Recomputed(Layers):
    """A block whose forward runs again within backward; it may be used `times` times."""

    def __init__(self, use_reentrant: bool, times: int) -> None:
        super().__init__()
        self.use_reentrant, self.times = use_reentrant, times

    def loss(self, x: Tensor, step: int) -> Tensor:
        x = self.a(x)
        for _ in range(self.times):
            x = checkpoint(self._block, x, use_reentrant=self.use_reentrant)
        return self.d(x).square().mean()

    def _block(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.c(self.b(x).tanh()), 0.1)


class Nested(Recomputed):
    """A block within a block, both of which run again."""

    def _block(self, x: Tensor) -> Tensor:
        return checkpoint(super()._block, self.a(x).tanh(), use_reentrant=False)


GRAPHS: dict[str, Any] = {
    "second order": Kind(partial(Penalised, 2)),
    "third order": Kind(partial(Penalised, 3)),
    "checkpointed": Kind(partial(Recomputed, False, 1)),
    "checkpointed twice": Kind(partial(Recomputed, False, 2)),
    "nested": Kind(partial(Nested, False, 1)),
    # which DistributedDataParallel refuses
    "re-entrant": Kind(partial(Recomputed, True, 1), oracle=BY_HAND),
    "re-entrant twice": Kind(partial(Recomputed, True, 2), oracle=BY_HAND),
}


@pytest.mark.parametrize("kind", GRAPHS.values(), ids=GRAPHS)
def test_bits_are_ddps(kind: Kind) -> None:
    """Gradients in another order, in parts, or by way of other gradients."""
    assert_equal_to_oracle(kind)
