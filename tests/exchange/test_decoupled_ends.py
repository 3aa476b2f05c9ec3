"""A failure here is a decoupled exchange that hangs, or hides what went wrong."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from processes import finish, python, start
from ranks import free_port, run_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.decoupled import DecoupledExchange, DecoupledExchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Halves, LoopbackTransport, Pending, Transport

CPU = torch.device("cpu")


class Switch:
    """A half of one rank, alone; it is done once the switch is set, or fails with `error`."""

    def __init__(self) -> None:
        self.on = threading.Event()
        self.error: Exception | None = None

    def wait(self) -> None:
        assert self.on.wait(30)
        if self.error is not None:
            raise self.error


class Switched:
    """Both halves of one rank, alone."""

    def __init__(self) -> None:
        self.halves = {"scatter": Switch(), "gather": Switch()}

    def reduce_scatter(self, rows: Tensor, *, key: str) -> Pending:
        return self.halves["scatter"]

    def all_gather(self, rows: Tensor, *, key: str) -> Pending:
        return self.halves["gather"]

    def switch_on(self) -> None:
        for half in self.halves.values():
            half.on.set()

    def close(self) -> None:
        return


class Started:
    """Two buckets, of which the first `count` have been started."""

    def __init__(self, transport: Transport, halves: Halves, count: int = 2) -> None:
        self.buckets = [Bucket([torch.ones(5)]), Bucket([torch.ones(7)])]
        self.exchanger = DecoupledExchanger(transport, halves)
        self.exchanger.adopt(self.buckets, [1, 1], [0, 1])
        self.exchanges = [self.start(number) for number in range(count)]

    def start(self, number: int, value: float = 1.0) -> DecoupledExchange:
        bucket = self.buckets[number]
        bucket.pack([torch.full(p.shape, value) for p in bucket.parameters], [True])
        return self.exchanger.start(bucket, key=f"bucket {number}")


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("lightning_mgwfbp")]


def test_a_bucket_keeps_its_memory_unless_somebody_holds_it() -> None:
    """Exchanges hold views: new memory in each step. Or gradients that are held get overwritten."""
    halves = Switched()
    halves.switch_on()
    started = Started(LoopbackTransport.solo(), halves)
    places = set()
    for _ in range(20):
        for exchange in started.exchanges:
            exchange.finish()
        held = [bucket.gradients() for bucket in started.buckets]
        places.add(tuple(views[0].data_ptr() for views in held))
        del held
        started.exchanges = [started.start(number) for number in range(2)]
    assert len(places) == 1
    for exchange in started.exchanges:
        exchange.finish()
    held = [bucket.gradients() for bucket in started.buckets]
    for exchange in [started.start(number, value=9.0) for number in range(2)]:
        exchange.finish()
    assert [views[0].tolist() for views in held] == [[1.0] * 5, [1.0] * 7]
    started.exchanger.close()


@pytest.mark.parametrize("half", ["scatter", "gather"])
def test_an_error_reaches_every_finish(half: str) -> None:
    """A failure in the background leaves the training waiting for ever, or is told as another."""
    halves = Switched()
    started = Started(LoopbackTransport.solo(), halves)
    halves.halves[half].error = RuntimeError("the cable was cut")
    halves.switch_on()
    for exchange in reversed(started.exchanges):
        with pytest.raises(RuntimeError, match="the cable was cut"):
            exchange.finish()
    started.exchanger.close()
    assert threads() == []


def test_after_an_error_nothing_can_be_started() -> None:
    """The rest of backward is sent for nothing."""
    halves = Switched()
    halves.halves["scatter"].error = RuntimeError("the cable was cut")
    started = Started(LoopbackTransport.solo(), halves, count=1)
    halves.switch_on()
    deadline = time.monotonic() + 30
    while threads():
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    with pytest.raises(RuntimeError, match="the cable was cut"):
        started.start(1)
    started.exchanger.close()


def test_what_waits_for_a_bucket_that_never_comes_is_refused() -> None:
    """An exception in backward leaves the round incomplete, and whoever cleans up hangs."""
    solo = LoopbackTransport.solo()
    started = Started(solo, solo.halves(CPU), count=1)
    with pytest.raises(RuntimeError, match="'bucket 0' comes after a bucket that has not been"):
        started.exchanges[0].finish()
    started.exchanger.close()
    with pytest.raises(RuntimeError, match="closed in the middle of a step"):
        started.exchanges[0].finish()
    assert threads() == []


def test_the_thread_lives_from_the_first_start_to_close() -> None:
    """A thread for an exchanger that nobody uses, one for every round, or one that stays."""
    solo = LoopbackTransport.solo()
    started = Started(solo, solo.halves(CPU), count=0)
    assert threads() == []
    for _ in range(3):
        for exchange in (started.start(0), started.start(1)):
            exchange.finish()
        assert len(threads()) == 1
    started.exchanger.adopt(started.buckets, [1, 1], [0, 1])
    assert threads() == []
    started.start(0)
    started.exchanger.close()
    assert threads() == []


def unequal(rank: int) -> list[str]:
    transport = TorchTransport(timeout=timedelta(seconds=60))
    started = Started(transport, transport.halves(CPU), count=2 - rank)
    started.exchanger.close()
    transport.close()
    return threads()


def test_ranks_that_stop_at_different_buckets_both_end() -> None:
    """They wait for each other's other half until the timeout."""
    assert run_ranks(unequal) == [[], []]


@pytest.mark.slow
def test_the_interpreter_ends_in_the_middle_of_a_step() -> None:
    """It aborts, or waits for a rank that is gone."""
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start(python("leave_mid_exchange.py"), RANK=str(rank), **environment) for rank in (0, 1)
    ]
    for ended in map(finish, ranks):
        assert (ended.code, ended.output) == (0, "")
