"""Embeddings whose gradients are sparse, or not, with whole numbers, whose sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_examples import lasting, plan_of
from torch import Tensor, nn

from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.compressors import TopK
from lightning_mgwfbp.exchange.methods import make_exchanger
from lightning_mgwfbp.exchange.transport import Transport

METHODS = {"dense": None, "topk": TopK(0.2, dense_below_numel=10)}
each = pytest.mark.parametrize("method", METHODS)
ROWS, WIDTH = 200, 4
Used = Sequence[Sequence[str]]


class Words(nn.Module):
    """Embeddings, and layers that share the sum of what is looked up."""

    def __init__(self, sparse: bool, layers: bool = True) -> None:
        super().__init__()
        self.first = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        if layers:
            self.middle = nn.Linear(WIDTH, 10)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, mode="sum")
        self.other = nn.Embedding(ROWS, WIDTH, sparse=sparse)
        if layers:
            self.last = nn.Linear(10, 1)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():  # whole numbers: sums are exact in any order
                p.copy_(torch.randint(-3, 4, p.shape, generator=generator))

    def forward(self, used: Sequence[str], seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(ROWS, (6,), generator=generator)
        looked_up = {
            "first": lambda: self.first(rows),
            "bag": lambda: self.bag(rows, torch.tensor([0, 2, 2, 3, 6, 6])),
            "other": lambda: self.other(rows.view(2, 3)).view(6, WIDTH),
            "nothing": lambda: self.first(rows[:0]).sum().expand(6, WIDTH),
        }
        total: Any = sum((looked_up[name]() for name in used), torch.zeros(6, WIDTH))
        if hasattr(self, "middle"):
            total = self.last(self.middle(total))
        return total.sum()


class Training:
    """One rank's."""

    def __init__(self, transport: Transport, method: str, sparse: bool, layers: bool = True):
        self.rank = transport.rank
        self.model = Words(sparse, layers)
        exchanger = make_exchanger(METHODS[method], transport)
        self.reducer = Reducer(lasting(self.model.named_parameters()), exchanger)
        count = len(self.reducer.plan.names)
        self.reducer.install(plan_of(self.model, 1, 1, count - 2))

    def step(self, *micro_batches: Used, seed: int, no_sync: bool = False) -> dict[str, Any]:
        """Backwards, of which all or only the last are exchanged; gradients as strided ones."""
        for number, everyones in enumerate(micro_batches):
            used = everyones[self.rank]
            if used:
                loss = self.model(used, 100 * seed + 10 * number + self.rank)
                if no_sync and number < len(micro_batches) - 1:
                    with self.reducer.no_sync():
                        loss.backward()
                    continue
                loss.backward()
            self.reducer.synchronize()
        return self.gradients()

    def gradients(self) -> dict[str, Any]:
        return {
            n: None if p.grad is None else p.grad.to_dense().clone()
            for n, p in self.model.named_parameters()
        }


ALL = ("first", "bag", "other")
EMBEDDINGS = [f"{name}.weight" for name in ALL]
CASES: dict[str, list[list[Used]]] = {
    "other rows": [[[ALL, ALL]]] * 3,
    "unused here": [[[ALL, ("bag",)]], [[("first",), ("other",)]], [[("bag",), ALL]]],
    "unused everywhere": [[[ALL, ALL]], [[("bag",), ("bag",)]], [[("first",), ("bag",)]]],
    "no backward here": [[[ALL, ()]], [[(), ALL]], [[(), ()]], [[ALL, ALL]]],
    "no rows here": [[[ALL, ("nothing",)]], [[("nothing",), ("nothing",)]]],
    "second backward": [[[ALL, ("bag",)], [("first",), ALL]], [[ALL, ALL], [ALL, ALL]]],
}


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for name, value in ours.items():
        if value is None or theirs[name] is None:
            assert value is theirs[name], name
        else:
            assert torch.equal(value, theirs[name]), name
