"""A failure here is a transport that breaks the contract which everything above it relies on."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from horovod_ranks import AloneTransport, on_horovod_ranks
from loopback import on_ranks, same_bits
from ranks import run_ranks

from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport

CPU = torch.device("cpu")


def _over_gloo(_: int, check: Callable[[Transport], Any]) -> Any:
    transport = TorchTransport()
    try:
        return check(transport)
    finally:
        transport.close()


def loopback(check: Callable[[Transport], Any]) -> list[Any]:
    return on_ranks(check)


def gloo(check: Callable[[Transport], Any]) -> list[Any]:
    return run_ranks(_over_gloo, check)


def horovod(check: Callable[[Transport], Any]) -> list[Any]:
    return on_horovod_ranks(check)


def horovod_alone(check: Callable[[Transport], Any]) -> list[Any]:
    return on_horovod_ranks(check, made=AloneTransport)


TRANSPORTS = [loopback, gloo, pytest.param(horovod, marks=pytest.mark.horovod)]
over_each = pytest.mark.parametrize("run", TRANSPORTS, ids=lambda run: run.__name__)
by_each = pytest.mark.parametrize(
    "run",
    [*TRANSPORTS, pytest.param(horovod_alone, marks=pytest.mark.horovod)],
    ids=lambda run: run.__name__,
)
Run = Callable[[Callable[[Transport], Any]], list[Any]]


def sums(transport: Transport) -> list[Any]:
    assert transport.world_size == 2
    buffers = [
        torch.full((3,), 1.0 + transport.rank),
        torch.full((2, 2), 1.0 + transport.rank, dtype=torch.float64),
        torch.tensor(5 * transport.rank),
        torch.full((4,), 0.5, dtype=torch.bfloat16),
        torch.full((4,), 200 * transport.rank, dtype=torch.uint8),
        torch.full((2, 1), 0.25 + transport.rank, dtype=torch.float16),
        torch.full((2,), 2**30, dtype=torch.int32) - transport.rank,
        torch.empty(0),
    ]
    pending = [transport.all_reduce(b, key=f"{i}") for i, b in enumerate(buffers)]
    for p in pending:
        p.wait()
    return [transport.rank, *(b.tolist() for b in buffers)]


bfloat16_is_known = pytest.mark.filterwarnings("ignore:Horovod cannot sum bfloat16")


@over_each
@bfloat16_is_known
def test_all_reduce_sums_in_place(run: Run) -> None:
    """Sums of any shape and dtype, several in flight."""
    expected = [[3.0] * 3, [[3.0] * 2] * 2, 5, [1.0] * 4, [200] * 4]
    expected += [[[1.5]] * 2, [2**31 - 1] * 2, []]
    assert run(sums) == [[0, *expected], [1, *expected]]


def gathers(transport: Transport) -> list[torch.Tensor]:
    received = []
    pending = []
    for dtype in (torch.float32, torch.uint8, torch.int64, torch.bfloat16):
        mine = torch.arange(3, dtype=dtype) + 10 * transport.rank
        received.append(torch.empty((transport.world_size, 3), dtype=dtype))
        pending.append(transport.all_gather(received[-1], mine, key=f"gather {dtype}"))
    for p in pending:
        p.wait()
    return received


@over_each
def test_all_gather_keeps_the_order_of_ranks(run: Run) -> None:
    """Rows in another order, of another dtype, or of this rank only."""
    for received in run(gathers):
        for rows in received:
            assert rows.tolist() == [[0, 1, 2], [10, 11, 12]]


def first_half(transport: Transport) -> list[Any]:
    halves = transport.halves(CPU)
    dtypes = (torch.float32, torch.int64, torch.bfloat16)
    given = [torch.arange(2 * 3, dtype=d).view(2, 3) + 10 * transport.rank for d in dtypes]
    pending = [halves.reduce_scatter(rows, key=f"half of {rows.dtype}") for rows in given]
    for p in pending:
        p.wait()
    halves.close()
    return [rows.tolist() for rows in given]


@by_each
@bfloat16_is_known
def test_reduce_scatter_gives_each_rank_the_sum_of_its_row(run: Run) -> None:
    """Another rank's row, only this rank's part of the sum, or rows that are others'."""
    first, second = [[10, 12, 14], [3, 4, 5]], [[10, 11, 12], [16, 18, 20]]
    assert run(first_half) == [[first] * 3, [second] * 3]


def both_halves(transport: Transport) -> list[Any]:
    rank, world_size = transport.rank, transport.world_size
    halves = transport.halves(CPU)
    rows = torch.arange(2.0 * world_size).view(world_size, 2) + 10 * rank
    for half in (halves.reduce_scatter, halves.all_gather):
        pending = half(rows, key="rows")
        for _ in range(2):
            pending.wait()
    halves.close()
    return rows.tolist()


@by_each
def test_both_halves_make_an_all_reduce(run: Run) -> None:
    """The own row is overwritten before it is read; or waiting twice adds twice, or hangs."""
    assert run(both_halves) == [[[10, 12], [14, 16]]] * 2


def kind_of_halves(transport: Transport) -> str:
    halves = transport.halves(CPU)
    halves.close()
    return type(halves).__name__


@pytest.mark.horovod
def test_beside_horovod_halves_go_over_torch() -> None:
    """Half the rate; or a group of ranks that are not Horovod's, where torch runs otherwise."""
    assert on_horovod_ranks(kind_of_halves) == ["DirectHalves"] * 2
    assert on_horovod_ranks(kind_of_halves, made=AloneTransport) == ["HorovodHalves"] * 2


def left_too_early(transport: Transport) -> bool:
    if transport.rank == 0:
        time.sleep(0.2)
    arrived = time.monotonic()
    transport.barrier(key="test")
    left = time.monotonic()
    return left < max(transport.all_gather_object(arrived, key="arrived"))


@over_each
def test_nobody_leaves_a_barrier_before_all_have_come(run: Run) -> None:
    """A barrier that lets a rank through."""
    assert run(left_too_early) == [False, False]


def copies(transport: Transport) -> list[torch.Tensor]:
    received = []
    for root in range(transport.world_size):
        buffer = torch.tensor([torch.nan, -0.0, float(transport.rank)])
        transport.broadcast(buffer, root, key=f"{root}").wait()
        received.append(buffer)
    return received


@over_each
def test_broadcast_copies_the_roots_bits(run: Run) -> None:
    """Another rank's value, or NaN and minus zero lost on the way."""
    for received in run(copies):
        for root, buffer in enumerate(received):
            assert same_bits(buffer, torch.tensor([torch.nan, -0.0, float(root)]))


def objects(transport: Transport) -> tuple[Any, Any, Any]:
    own = {"rank": transport.rank, "text": "x" * (1 + 1000 * transport.rank)}
    gathered = transport.all_gather_object(own, key="gather")
    given = [transport.broadcast_object(own, root, key=f"{root}") for root in (0, 1)]
    return [g["rank"] for g in gathered], [len(g["text"]) for g in gathered], given


@over_each
def test_objects_arrive_whole_and_in_the_order_of_ranks(run: Run) -> None:
    """Values of different size on the ranks, or the wrong root."""
    for ranks, lengths, given in run(objects):
        assert ranks == [0, 1]
        assert lengths == [1, 1001]
        assert [g["rank"] for g in given] == [0, 1]


def mismatched(transport: LoopbackTransport) -> None:
    transport.all_reduce(torch.zeros(1), key=f"bucket {transport.rank}").wait()


def test_ranks_that_meet_with_different_keys_fail() -> None:
    """A wrong launch order would go unseen by every test on the loopback."""
    with pytest.raises(AssertionError, match=r"different collectives.*bucket 0.*bucket 1"):
        on_ranks(mismatched)


def one_leaves(transport: LoopbackTransport) -> None:
    if transport.rank == 0:
        raise KeyError("this rank")
    transport.all_reduce(torch.zeros(1), key="bucket 0").wait()


def test_a_rank_that_raises_ends_the_others() -> None:
    """The tests' own threads hang instead of saying what went wrong."""
    with pytest.raises(KeyError, match="this rank"):
        on_ranks(one_leaves)
