"""A failure here is an average of sparse gradients that is not the mean, or no longer sparse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from ranks import run_ranks
from torch import Tensor
from torch.nn import functional

from lightning_mgwfbp.exchange.rows import average_rows
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending, Transport

SHAPES = ((9, 3), (5, 2))


def gradient(shape: tuple[int, ...], rows: list[int], seed: int, dtype: Any = None) -> Tensor:
    """As an embedding makes it: not coalesced, a row as often as it was looked up."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-99, 99, (len(rows), *shape[1:]), generator=generator).to(
        dtype or torch.float32
    )
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, shape, check_invariants=False
    )


def average(transport: Transport, everyones: list[list[Tensor | None]]) -> list[Tensor]:
    given = everyones[transport.rank]
    dtype = next(g.dtype for g in everyones[0] if g is not None)
    parameters = [torch.zeros(s, dtype=dtype) for s in SHAPES]
    before = [g if g is None else g.clone() for g in given]
    averages = average_rows(given, parameters, transport, key="rows")
    for ours, theirs in zip(given, before, strict=True):
        assert ours is None or torch.equal(ours.to_dense(), theirs.to_dense())  # type: ignore[union-attr]
    return averages


def averaged(*everyones: list[Tensor | None]) -> list[list[Tensor]]:
    return on_ranks(average, list(everyones), world_size=len(everyones))


def dense_mean(everyones: tuple[list[Tensor | None], ...], n: int) -> Tensor:
    total: Any = 0
    for given in everyones:
        mine = given[n]
        if mine is not None:
            total = total + mine.to_dense() * (1 / len(everyones))
    return total


CASES: dict[str, tuple[list[Tensor | None], ...]] = {
    "other rows": (
        [gradient(SHAPES[0], [1, 4, 1], 0), gradient(SHAPES[1], [0], 1)],
        [gradient(SHAPES[0], [8, 4], 2), gradient(SHAPES[1], [3, 0, 2, 1], 3)],
    ),
    "no rows here": (
        [gradient(SHAPES[0], [], 0), gradient(SHAPES[1], [2], 1)],
        [gradient(SHAPES[0], [8, 4], 2), gradient(SHAPES[1], [], 3)],
    ),
    "no rows anywhere": (
        [gradient(SHAPES[0], [], 0), gradient(SHAPES[1], [], 1)],
        [gradient(SHAPES[0], [], 2), gradient(SHAPES[1], [], 3)],
    ),
    "not used here": (
        [gradient(SHAPES[0], [7], 0), None],
        [None, gradient(SHAPES[1], [2, 3], 3)],
    ),
    "strided here": (
        [gradient(SHAPES[0], [7], 0).to_dense(), gradient(SHAPES[1], [2], 1)],
        [gradient(SHAPES[0], [1], 1), gradient(SHAPES[1], [2], 3).to_dense()],
    ),
    "single elements": (
        [gradient(SHAPES[0], [7], 0).to_dense().to_sparse(2), gradient(SHAPES[1], [2], 1)],
        [gradient(SHAPES[0], [7], 1), gradient(SHAPES[1], [2], 3)],
    ),
    "bfloat16": (
        [gradient(SHAPES[0], [7, 7], 0, torch.bfloat16), None],
        [gradient(SHAPES[0], [7, 1, 2], 1, torch.bfloat16), None],
    ),
    "three ranks": (
        [gradient(SHAPES[0], [7], 0), gradient(SHAPES[1], [2], 1)],
        [gradient(SHAPES[0], [2, 7], 1), gradient(SHAPES[1], [2, 1, 0], 3)],
        [None, gradient(SHAPES[1], [2], 5)],
    ),
}


@pytest.mark.parametrize("everyones", CASES.values(), ids=CASES)
def test_the_mean_over_ranks(everyones: tuple[list[Tensor | None], ...]) -> None:
    """Another rank's rows are read at this rank's lengths, or rows are counted twice."""
    results = averaged(*everyones)
    for averages in results:
        for n, ours in enumerate(averages):
            assert ours.is_sparse
            assert ours.is_coalesced()
            assert (ours.shape, ours.sparse_dim()) == (SHAPES[n], 1)
            mean = dense_mean(everyones, n)
            if isinstance(mean, Tensor) and len(everyones) == 2:
                assert torch.equal(ours.to_dense(), mean)
            else:
                torch.testing.assert_close(
                    ours.to_dense(), torch.zeros(SHAPES[n], dtype=ours.dtype) + mean
                )
            assert same_bits(ours.values(), results[0][n].values())


def test_only_rows_travel() -> None:
    """A gradient of a large vocabulary travels whole."""

    def count(transport: LoopbackTransport) -> list[int]:
        sizes = []
        start = transport.all_gather

        def all_gather(output: Tensor, buffer: Tensor, *, key: str) -> Pending:
            sizes.append(buffer.nbytes)
            return start(output, buffer, key=key)

        transport.all_gather = all_gather  # type: ignore[method-assign]
        parameter = torch.zeros(10_000, 4)
        mine = gradient((10_000, 4), [5, 5, 9_999][transport.rank :], 0)
        average_rows([mine, None], [parameter, parameter], transport, key="rows")
        return sizes

    # counts of two gradients; of one of them two rows on each rank, each of 4 floats and its number
    assert on_ranks(count) == [[16, 2 * (4 * 4 + 8)]] * 2


def test_a_rank_without_rows_does_not_allocate_all_of_them() -> None:
    """An embedding that is not used here costs the memory of all its rows."""
    parameter = torch.zeros(1, 1).expand(2**24, 2**24)  # nobody could allocate so much
    (nothing,) = average_rows([None], [parameter], LoopbackTransport.solo(), key="rows")
    assert nothing._nnz() == 0
    assert nothing.shape == parameter.shape


def average_on_gloo(rank: int, cases: list[str]) -> list[list[Tensor]]:
    averages = [average(TorchTransport.world(), list(CASES[case])) for case in cases]
    return [[a.to_dense() for a in each] for each in averages]


def test_on_gloo() -> None:
    """Gloo needs another layout, or does not take messages of no bytes."""
    cases = [case for case, everyones in CASES.items() if len(everyones) == 2]
    for results in run_ranks(average_on_gloo, cases):
        for averages, case in zip(results, cases, strict=True):
            for n, ours in enumerate(averages):
                assert torch.equal(ours, torch.zeros_like(ours) + dense_mean(CASES[case], n))


def test_gradients_of_an_embedding() -> None:
    """What autograd makes is laid out otherwise than what these tests make."""
    weight = torch.randn(9, 3, requires_grad=True)
    functional.embedding(torch.tensor([[2, 2], [5, 0]]), weight, sparse=True).sum().backward()
    assert weight.grad is not None
    (ours,) = average_rows([weight.grad], [weight.detach()], LoopbackTransport.solo(), key="rows")
    assert ours.to_dense().sum(1).tolist() == [3, 0, 6, 0, 0, 3, 0, 0, 0]
