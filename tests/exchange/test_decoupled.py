"""A failure here is an average that is not that of an all-reduce, or messages in another order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from horovod_ranks import AloneTransport, on_horovod_ranks
from loopback import on_ranks, same_bits
from ranks import run_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressors import Cast
from lightning_mgwfbp.exchange.decoupled import DecoupledExchanger
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import (
    LoopbackHalves,
    LoopbackTransport,
    Pending,
    Transport,
)

SHAPES = ((300,), (), (7, 5), (0, 3), (4, 3, 2, 2), (1001,))
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
CPU = torch.device("cpu")
ROUNDS = 3
PLANS = 4


def buckets_of(seed: int) -> list[Bucket]:
    draw = random.Random(seed)
    buckets = []
    for _ in range(draw.randint(1, 5)):
        dtype = draw.choice(DTYPES)
        shapes = draw.sample(SHAPES, draw.randint(1, len(SHAPES)))
        buckets.append(Bucket([torch.zeros(shape, dtype=dtype) for shape in shapes]))
    return buckets


def cut_of(count: int, seed: int) -> tuple[list[int], list[int]]:
    """Random pieces, one to six, of `count` buckets, and order of all."""
    draw = random.Random(seed)
    pieces = [draw.randint(1, 6) for _ in range(count)]
    gathers = [number for number, of_it in enumerate(pieces) for _ in range(of_it)]
    draw.shuffle(gathers)
    return pieces, gathers


def pack(bucket: Bucket, seed: int) -> None:
    """Random gradients, some of them missing, and a notice now and then."""
    generator = torch.Generator().manual_seed(seed)
    used = (torch.rand(len(bucket.parameters), generator=generator) < 0.7).tolist()
    drawn = [torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in bucket.parameters]
    gradients = [g if there else None for g, there in zip(drawn, used, strict=True)]
    bucket.pack(gradients, used, notice=bool(seed % 2))


def exchanged(exchanger: Exchanger, buckets: Sequence[Bucket]) -> Iterator[list[Tensor]]:
    """The buffers after each of several rounds, whose buckets each rank finishes as it likes."""
    rank = exchanger.transport.rank
    for step in range(ROUNDS):
        exchanges = []
        for number, bucket in enumerate(buckets):
            pack(bucket, seed=1000 * step + 10 * number + rank)
            exchanges.append(exchanger.start(bucket, key=f"bucket {number}"))
        random.Random(rank + step).shuffle(exchanges)
        for exchange in exchanges:
            exchange.finish()
        yield [bucket.buffer.clone() for bucket in buckets]


def both_ways(transport: Transport, cast: Cast | None, is_cut: bool) -> list[Any]:
    """What comes out of the two halves, and of all-reduces; of several plans, one after another."""
    exchanger = DecoupledExchanger(transport, transport.halves(CPU), cast)
    results = []
    for seed in range(PLANS):
        ours, theirs = buckets_of(seed), buckets_of(seed)
        exchanger.adopt(ours, *(cut_of(len(ours), seed) if is_cut else ()))
        halves = list(exchanged(exchanger, ours))
        results.append((halves, list(exchanged(DenseExchanger(transport, cast), theirs))))
    exchanger.close()
    return results


def _over_gloo(_: int, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    transport = TorchTransport()
    try:
        return run(transport, *args)
    finally:
        transport.close()


def over_loopback(run: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return on_ranks(run, *args, world_size=world_size)


def over_gloo(run: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return run_ranks(_over_gloo, run, args, world_size=world_size)


def over_horovod(run: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return on_horovod_ranks(run, *args, world_size=world_size)


def over_horovod_alone(run: Callable[..., Any], *args: Any, world_size: int) -> list[Any]:
    return on_horovod_ranks(run, *args, world_size=world_size, made=AloneTransport)


over_each = pytest.mark.parametrize(
    "over",
    [
        over_loopback,
        over_gloo,
        pytest.param(over_horovod, marks=pytest.mark.horovod),
        pytest.param(over_horovod_alone, marks=pytest.mark.horovod),
    ],
    ids=["loopback", "gloo", "horovod", "horovod alone"],
)


@over_each
@pytest.mark.filterwarnings("ignore:Horovod cannot sum bfloat16")
@pytest.mark.parametrize("is_cut", [True, False], ids=["random", "default"])
@pytest.mark.parametrize("cast", [None, Cast("bfloat16")], ids=repr)
@pytest.mark.parametrize("world_size", [2, 3])
def test_halves_make_a_whole(
    over: Callable[..., Any], world_size: int, cast: Cast | None, is_cut: bool
) -> None:
    """Shards, pieces, scale or tail: two ranks get an all-reduce's bits, three get equal ones."""
    ranks = over(both_ways, cast, is_cut, world_size=world_size)
    for rank in ranks:
        for (halves, whole), (firsts, _) in zip(rank, ranks[0], strict=True):
            for ours, theirs, first in zip(halves, whole, firsts, strict=True):
                assert all(map(same_bits, ours, first))
                if world_size == 2:
                    assert all(map(same_bits, ours, theirs))
                for a, b in zip(ours, theirs, strict=True):
                    eps = 2.0**-7 if cast is not None else torch.finfo(a.dtype).eps
                    torch.testing.assert_close(a, b, rtol=4 * eps, atol=4 * eps)


def few_numbers(transport: Transport) -> tuple[list[Any], list[bool], bool]:
    bucket = Bucket([torch.zeros(()), torch.zeros(0)])
    exchanger = DecoupledExchanger(transport, transport.halves(CPU))
    exchanger.adopt([bucket], [2], [0, 0])
    mine = torch.tensor(float(transport.rank))
    bucket.pack([mine, None], [True, False], notice=transport.rank == 1)
    exchanger.start(bucket, key="bucket 0").finish()
    exchanger.close()
    return [g.tolist() for g in bucket.gradients()], bucket.used(), bucket.noticed()


def test_fewer_numbers_than_ranks() -> None:
    """Empty shards, or padding that is taken for numbers."""
    results = on_ranks(few_numbers, world_size=7)
    assert all(result == results[0] for result in results)
    (mean, _), used, noticed = results[0]
    assert mean == pytest.approx(3.0)
    assert (used, noticed) == ([True, False], True)


class Logged(LoopbackHalves):
    """One rank, alone, that logs what it all-gathers."""

    def __init__(self) -> None:
        super().__init__(LoopbackTransport.solo(), LoopbackTransport.solo())
        self.keys: list[str] = []

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        self.keys.append(key)
        return super().all_gather(rows, key=key)


def keys_of(*numbers: int) -> list[str]:
    """Of the pieces of buckets with these numbers, in each round."""
    pieces: Counter[int] = Counter()
    keys = []
    for number in numbers:
        keys.append(f"bucket {number}, piece {pieces[number]}")
        pieces[number] += 1
    return keys * ROUNDS


def test_all_gathers_have_their_own_order() -> None:
    """What forward uses last delays what it uses first."""
    logged = Logged()
    exchanger = DecoupledExchanger(LoopbackTransport.solo(), logged)
    buckets = [Bucket([torch.zeros(9)]) for _ in range(3)]
    exchanger.adopt(buckets, [1, 3, 2], [1, 2, 1, 2, 0, 1])
    list(exchanged(exchanger, buckets))
    exchanger.close()
    assert logged.keys == keys_of(1, 2, 1, 2, 0, 1)


def test_pieces_are_bounded_on_the_wire_where_no_plan_says() -> None:
    """Large messages fall behind the link; a cast halves what a piece carries."""
    numbers = 5 * 2**20 // 4
    for cast, most in ((None, 6), (Cast("bfloat16"), 3)):
        logged = Logged()
        exchanger = DecoupledExchanger(LoopbackTransport.solo(), logged, cast)
        buckets = [Bucket([torch.zeros(3)]), Bucket([torch.zeros(numbers)])]
        exchanger.adopt(buckets)
        list(exchanged(exchanger, buckets))
        exchanger.close()
        assert logged.keys == keys_of(*[1] * most, 0)
