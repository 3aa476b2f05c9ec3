"""A failure here is how the transport treats torch.distributed's process groups."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from lightning_mgwfbp.exchange.torch_transport import TorchTransport


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
