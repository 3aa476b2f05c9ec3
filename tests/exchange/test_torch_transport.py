"""A failure here is how the transport treats torch.distributed's process groups."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from loopback import same_bits
from ranks import run_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.torch_halves import DirectHalves
from lightning_mgwfbp.exchange.torch_transport import TorchTransport

_CPU = torch.device("cpu")


def test_it_says_what_to_initialise() -> None:
    """A bare error from inside torch, which does not say what to do."""
    with pytest.raises(RuntimeError, match="init_process_group"):
        TorchTransport()


def _own_group(_: int) -> bool:
    transport = TorchTransport()
    group = transport._group
    assert group in dist.distributed_c10d._world.pg_map
    transport.close()
    assert group not in dist.distributed_c10d._world.pg_map
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item() == 2


def test_close_destroys_its_own_group_and_no_other() -> None:
    """Threads and sockets that stay, or a default group that others still need."""
    assert run_ranks(_own_group) == [True, True]


def _given_group(_: int) -> float:
    transport = TorchTransport.world()
    transport.close()
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item()


def test_close_leaves_a_given_group_alone() -> None:
    """The same for a group that the caller brought."""
    assert run_ranks(_given_group) == [2.0, 2.0]


def _timeouts(_: int) -> list[float]:
    given = dist.new_group(timeout=timedelta(seconds=7))
    transports = [TorchTransport(given), TorchTransport(timeout=timedelta(seconds=8))]
    transports.append(TorchTransport(given, timedelta(seconds=9)))
    seconds = []
    for transport in transports:
        halves = transport.halves(_CPU)
        assert isinstance(halves, DirectHalves)
        ways = (halves._upwards, halves._downwards)
        seconds += [way.options._timeout.total_seconds() for way in ways]
        halves.close()
        transport.close()
    return seconds


def test_halves_have_the_groups_timeout() -> None:
    """A rank that is stopped is waited for half an hour, whatever the user has said."""
    assert run_ranks(_timeouts) == [[7, 7, 8, 8, 9, 9]] * 2


def _two_sums(
    rank: int, device: torch.device, dtype: torch.dtype, world_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over all ranks by an all-reduce, by its two halves, and in the order of ranks."""
    transport = TorchTransport()
    given = [
        torch.randn(world_size, 1000, generator=torch.Generator().manual_seed(r)).mul(99).to(dtype)
        for r in range(world_size)
    ]
    whole, halves = given[rank].clone(), given[rank].clone()
    transport.all_reduce(whole, key="whole").wait()
    by = transport.halves(device)
    by.reduce_scatter(halves, key="scatter").wait()
    by.all_gather(halves, key="gather").wait()
    by.close()
    transport.close()
    in_order = given[0].clone()
    for each in given[1:]:
        in_order += each
    return whole, halves, in_order


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_reduce_scatter_adds_in_the_order_of_ranks(dtype: torch.dtype, world_size: int) -> None:
    """Two ranks get other bits than an all-reduce's, or sums depend on who comes first."""
    args = (_CPU, dtype, world_size)
    for whole, halves, in_order in run_ranks(_two_sums, *args, world_size=world_size):
        assert same_bits(halves, in_order)
        assert world_size > 2 or same_bits(halves, whole)


def test_halves_by_collectives_make_an_all_reduce() -> None:
    """What accelerators use takes another row for its own, or a group that is not there."""
    for whole, halves, _ in run_ranks(_two_sums, torch.device("meta"), torch.float32, 2):
        assert same_bits(halves, whole)


def _part(rank: int) -> list[list[float]]:
    group = dist.new_group([0, 1])
    sums = []
    for _ in range(3 if rank < 2 else 0):
        transport = TorchTransport(group)
        both = [transport.halves(_CPU), transport.halves(_CPU)]
        for halves in both:
            rows = torch.full((2, 1), rank + 1.0)
            halves.reduce_scatter(rows, key="scatter").wait()
            halves.all_gather(rows, key="gather").wait()
            sums.append(rows.flatten().tolist())
            halves.close()
        transport.close()
    return sums


def test_ranks_of_a_part_meet_again_and_again() -> None:
    """Halves of a group that not all ranks belong to meet at the addresses of others before."""
    assert run_ranks(_part, world_size=3) == [[[3.0, 3.0]] * 6] * 2 + [[]]


def _subgroup(rank: int) -> list[int]:
    group = dist.new_group([1])
    if rank == 0:
        return []
    transport = TorchTransport(group)
    buffer = torch.tensor([7])
    transport.broadcast(buffer, 0, key="broadcast").wait()
    return [transport.rank, transport.world_size, transport.broadcast_object(8, 0, key="object")]


def test_roots_are_ranks_of_the_group() -> None:
    """A group's ranks are taken for global ones."""
    assert run_ranks(_subgroup) == [[], [0, 1, 8]]
