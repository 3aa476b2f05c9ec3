"""A failure here is a sparse gradient with another average than a dense one, or one sent whole."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_examples import lasting, plan_of
from loopback import on_ranks
from ranks import run_ranks
from row_examples import (
    ALL,
    CASES,
    EMBEDDINGS,
    METHODS,
    ROWS,
    WIDTH,
    Training,
    Used,
    Words,
    compare,
    each,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, SparseAdam

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.methods import make_exchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending
from lightning_mgwfbp.plan import AlphaBeta


@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("layers", [True, False], ids=["mixed", "only sparse"])
@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_as_if_gradients_were_dense(
    steps: list[list[Used]], layers: bool, keep: bool, no_sync: bool
) -> None:
    """The case by whose name a gradient is not the one of sparse=False."""

    def train(transport: LoopbackTransport, sparse: bool) -> list[dict[str, Any]]:
        training = Training(transport, "dense", sparse, layers)
        seen = []
        for seed, micro_batches in enumerate(steps):
            seen.append(training.step(*micro_batches, seed=seed, no_sync=no_sync))
            if not keep:
                training.model.zero_grad()
        return seen

    for ours, theirs in zip(on_ranks(train, True), on_ranks(train, False), strict=True):
        for gradients, others in zip(ours, theirs, strict=True):
            compare(gradients, others)


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_rows_are_exact_under_top_k_too(steps: list[list[Used]]) -> None:
    """A compressor meets a sparse gradient, or averages are sent twice."""

    def train(transport: LoopbackTransport, method: str) -> list[dict[str, Any]]:
        training = Training(transport, method, sparse=True)
        return [training.step(*m, seed=seed) for seed, m in enumerate(steps)]  # never cleared

    for ours, theirs in zip(on_ranks(train, "topk"), on_ranks(train, "dense"), strict=True):
        for gradients, others in zip(ours, theirs, strict=True):
            compare({n: gradients[n] for n in EMBEDDINGS}, others)


def rows_on_gloo(rank: int, sparse: bool, method: str) -> list[dict[str, Any]]:
    training = Training(TorchTransport.world(), method, sparse)
    return [training.step(*m, seed=seed) for seed, m in enumerate(CASES["unused here"])]


@each
def test_on_gloo(method: str) -> None:
    """Real processes: another order of collectives on one of them would hang here."""
    for ours, theirs in zip(
        run_ranks(rows_on_gloo, True, method), run_ranks(rows_on_gloo, False, "dense"), strict=True
    ):
        for gradients, others in zip(ours, theirs, strict=True):
            compare({n: gradients[n] for n in EMBEDDINGS}, others)


@each
def test_they_stay_sparse_and_only_rows_travel(method: str) -> None:
    """An embedding travels whole after the first step, or its gradient has become strided."""

    def train(transport: LoopbackTransport) -> list[int]:
        nbytes = [0]

        def counting(start: Any) -> Any:
            def collective(*tensors: Tensor, key: str) -> Pending:
                nbytes[-1] += tensors[-1].nbytes
                return start(*tensors, key=key)

            return collective

        transport.all_reduce = counting(transport.all_reduce)  # type: ignore[method-assign]
        transport.all_gather = counting(transport.all_gather)  # type: ignore[method-assign]
        training = Training(transport, method, sparse=True)
        names, version = training.reducer.plan.names, training.reducer.known.version
        for seed in range(3):
            training.step([ALL, ALL], seed=seed)
            nbytes.append(0)
            for name, p in training.model.named_parameters():
                assert p.grad is not None
                assert p.grad.is_sparse == (name in EMBEDDINGS)
            training.model.zero_grad()
        assert training.reducer.plan.names == names
        assert training.reducer.known.version == version  # nobody joined or left
        assert sorted(training.reducer.known.rowwise) == sorted(EMBEDDINGS)
        carried = training.reducer.layout.carried
        assert [carried[n].numel() for n in EMBEDDINGS] == [0, 0, 0]
        return nbytes

    for first, *others, _ in on_ranks(train):
        assert first > max(others)  # not known to be sparse yet
        # of three embeddings six rows, at most, with their numbers; the layers; counts and flags
        assert all(0 < n <= 3 * 6 * (WIDTH * 4 + 8) + 61 * 4 + 3 * 8 + 64 for n in others)


@each
def test_mixed_with_strided_gradients(method: str) -> None:
    """A weight that is looked up on one rank and multiplied on another, or both, late and early."""

    def train(transport: LoopbackTransport) -> list[Tensor]:
        weight = nn.Parameter(torch.zeros(8, 2))
        last = nn.Parameter(torch.zeros(1))
        exchanger = make_exchanger(METHODS[method], transport)
        model = nn.ParameterDict({"last": last, "weight": weight})
        reducer = Reducer(lasting(model.named_parameters()), exchanger)
        reducer.install(plan_of(model, 1, 1))
        rows = torch.tensor([transport.rank, 5])

        def look_up() -> None:
            (functional.embedding(rows, weight, sparse=True).sum() + last.sum()).backward()

        def multiply() -> None:
            (weight.sum() + last.sum()).backward()

        seen = []
        for calls in (
            [(look_up,), (multiply,)],  # by rank
            [(multiply,), (look_up,)],
            [(look_up, multiply), (look_up,)],
            [(multiply, look_up), ()],
            [(), (look_up, multiply)],
        ):
            for call in calls[transport.rank]:
                call()
            reducer.synchronize()
            assert weight.grad is not None
            seen.append(weight.grad.to_dense().clone())  # what the steps before gave is kept
        return seen

    one = torch.ones(8, 2)

    def rows_of(rank: int) -> Tensor:
        looked_up = torch.zeros(8, 2)
        looked_up[[rank, 5]] = 1.0
        return looked_up

    first, second = rows_of(0), rows_of(1)
    new = [first + one, one + second, first + one + second, one + first, second + one]
    ranks = on_ranks(train)
    for seen in ranks:
        assert torch.equal(seen[-1], ranks[0][-1])
        for s, gradient in enumerate(seen if method == "dense" else []):  # top-k leaves rests
            assert torch.equal(gradient, sum(new[: s + 1]) / 2), s


def test_a_late_strided_part_of_what_is_not_known_to_be_sparse() -> None:
    """The sum of both parts cannot be made, since one is sparse."""

    def train(transport: LoopbackTransport) -> Tensor:
        model = nn.ParameterDict({"last": torch.zeros(1), "weight": torch.zeros(8, 2)})
        weight = model["weight"]
        reducer = Reducer(lasting(model.named_parameters()), make_exchanger(None, transport))
        reducer.install(plan_of(model, 1, 1))
        reducer._expected = [1, 1]  # as after a backward with strided gradients
        functional.embedding(torch.tensor([3, 3]), weight, sparse=True).sum().backward()
        weight.sum().backward()
        reducer.synchronize()
        return weight.grad.to_dense()

    expected = torch.ones(8, 2)
    expected[3] = 3.0
    for gradient in on_ranks(train):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam"])
def test_optimizers_step_on_them(optimizer: str) -> None:
    """Averages are of a form that optimizers for sparse gradients refuse."""

    def train(transport: LoopbackTransport, sparse: bool) -> list[Tensor]:
        model = Words(sparse, layers=False)
        kinds = {"SGD": SGD, "SparseAdam": SparseAdam if sparse else Adam}
        merged = MergedOptimizer(
            kinds[optimizer](model.parameters(), lr=0.125),  # type: ignore[operator]
            model.named_parameters(),
            transport=transport,
            link=AlphaBeta(1e-3, 1e-9),
            warmup_steps=2,
        )
        for seed in range(8 if optimizer == "SGD" else 1):  # lazy moments differ from the second
            merged.zero_grad()
            model(ALL, 10 * seed + transport.rank).backward()
            merged.step()
        if optimizer == "SGD":
            assert merged.tuned is not None
            layers = {layer.name: layer.numel for layer in merged.tuned.profile.layers}
            assert layers == dict.fromkeys(EMBEDDINGS, 0 if sparse else ROWS * WIDTH)
        merged.close()
        return [p.detach() for p in model.parameters()]

    for ours, theirs in zip(on_ranks(train, True), on_ranks(train, False), strict=True):
        for p, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, other)


@each
@pytest.mark.parametrize("steps_before", [0, 2], ids=["not known to be sparse", "known"])
def test_a_row_that_is_not_finite_discards_all_rests(method: str, steps_before: int) -> None:
    """An overflow in an embedding is not seen where rests are kept, or raises an error."""

    def train(transport: LoopbackTransport) -> None:
        training = Training(transport, method, sparse=True)
        for seed in range(steps_before):
            training.step([ALL, ALL], seed=seed)
            training.model.zero_grad()
        before = training.reducer.exchanger.state_dict().get("residual", {})
        assert bool(before) == (method == "topk" and steps_before > 0)
        if transport.rank == 1:
            training.model.first.weight.register_hook(lambda g: g * math.inf)
        gradients = training.step([ALL, ALL], seed=2)
        assert not gradients["first.weight"].isfinite().all()
        after = training.reducer.exchanger.state_dict().get("residual", {})
        assert all(torch.equal(r, before.get(n, torch.zeros_like(r))) for n, r in after.items())

    on_ranks(train)


def test_a_resumed_run_knows_which_are_sparse() -> None:
    """It learns them anew, and its first exchange compresses other buckets."""

    def train(transport: LoopbackTransport) -> tuple[Any, Any]:
        straight, first = (Training(transport, "topk", sparse=True) for _ in range(2))
        for seed in range(3):
            straight.step([ALL, ALL], seed=seed)
            first.step([ALL, ALL], seed=seed)
            for training in (straight, first):
                training.model.zero_grad()
        states = transport.all_gather_object(first.reducer.exchanger.state_dict(), key="states")
        resumed = Training(transport, "topk", sparse=True)
        resumed.reducer.expect_rowwise(first.reducer.known.rowwise)
        resumed.reducer.exchanger.load_state_dict(states)
        return straight.step([ALL, ALL], seed=3), resumed.step([ALL, ALL], seed=3)

    for straight, resumed in on_ranks(train):
        assert straight.keys() == resumed.keys()
        for name, gradient in straight.items():
            assert torch.equal(gradient, resumed[name]), name
