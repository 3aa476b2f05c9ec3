"""A failure here means: an error of the network names no rank, or the wrong one."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from ranks import run_ranks

from lightning_mgwfbp.exchange.roll_call import RollCall
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport

SILENT = "has ended, is stopped, or cannot be reached"


def opened() -> RollCall:
    roll = RollCall.opened(TorchTransport.world())
    assert roll is not None
    assert RollCall.present() is roll
    return roll


def rank_2_is_gone(rank: int) -> tuple[str, str]:
    """What the others hear; rank 1 is alive, but busy with something else."""
    roll = opened()
    if rank == 2:
        roll.close()
    dist.barrier()
    asked = ("", "")
    if rank == 0:
        asked = roll.missing(), roll.ask("exchanging merge group 1")
    dist.barrier()
    roll.close()
    return asked


@pytest.mark.slow
def test_who_does_not_answer_is_named() -> None:
    """And only that one: ranks that wait elsewhere answer."""
    missing, why = run_ranks(rank_2_is_gone, world_size=3)[0]
    assert missing == why
    assert missing.startswith("Rank 2 (on ")
    assert missing.endswith(SILENT)


def rank_1_does_not_come(rank: int) -> str:
    """What rank 0 hears while rank 1 has not opened its own; where the store is, all are alive."""
    transport = TorchTransport.world()
    if rank == 1:
        number = transport.broadcast_object(0, 0, key="roll call")
        assert number == 1
        dist.barrier()
        return ""
    roll = opened()
    missing = roll.missing()
    roll.close()
    dist.barrier()
    return missing


@pytest.mark.slow
def test_a_rank_that_has_not_come_so_far_is_named() -> None:
    """Asking for what such a rank has never written waits for ever, or blames the store."""
    assert run_ranks(rank_1_does_not_come)[0] == f"Rank 1 {SILENT}"


def twice(rank: int) -> list[str]:
    """In the first training rank 1 ends with an error, in the second all are there."""
    said = []
    for training in range(2):
        roll = opened()
        if rank == 1 and training == 0:
            roll.tell("ValueError: too late")
        dist.barrier()
        said.append(roll.ask("exchanging merge group 1") if rank == 0 else "")
        dist.barrier()
        roll.close()
    assert RollCall.present() is None
    return said


def test_who_ends_says_why() -> None:
    """The reason gets lost, or is still there in the next training of the same processes."""
    ended, alive = run_ranks(twice)[0]
    assert ended.startswith("Rank 1 (on ")
    assert ended.endswith("ended with ValueError: too late")
    assert alive.endswith("is alive, in no exchange")


@dataclass
class CutOff:
    """A store whose host answers no more, once it is cut."""

    is_cut: bool = False
    is_over: threading.Event = field(default_factory=threading.Event)

    def add(self, key: str, amount: int) -> int:
        if self.is_cut:
            self.is_over.wait()
            raise RuntimeError("connection reset")
        return amount

    def set(self, key: str, value: str) -> None:
        self.add(key, 0)

    def clone(self) -> CutOff:
        return self


@pytest.mark.slow
def test_a_store_that_never_answers() -> None:
    """It holds up the rank that asks."""
    store = CutOff()
    roll = RollCall(store, 1, 2, 1)  # type: ignore[arg-type]
    store.is_cut = True
    begin = time.monotonic()
    assert roll.missing() == f"Rank 0, or the host that keeps its store, {SILENT}"
    assert time.monotonic() - begin < 10.0
    store.is_over.set()
    roll.close()


def test_only_where_torch_distributed_knows_the_ranks() -> None:
    """Horovod's own, and one process, have no store."""
    assert RollCall.opened(LoopbackTransport.solo()) is None
