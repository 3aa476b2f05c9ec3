"""A failure here is how the transport treats Horovod: its names, its errors, its start and end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from horovod_ranks import on_horovod_ranks
from processes import run
from ranks import run_ranks

from lightning_mgwfbp.exchange.horovod_hosts import Place, places, require_reachable
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod, start_horovod, stop_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport, _warn_of_bfloat16
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, in_background
from lightning_mgwfbp.measure.collectives import time_all_gather, time_all_reduce


@pytest.mark.slow
def test_the_package_imports_without_horovod() -> None:
    """An optional dependency that is touched by whoever does not use it."""
    program = (
        "import sys, lightning_mgwfbp, lightning_mgwfbp.exchange.horovod_transport\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'horovod']"
    )
    ended = run([sys.executable, "-c", program])
    assert ended.code == 0, ended.output


@pytest.mark.parametrize("use", [HorovodTransport, lambda: start_horovod(LoopbackTransport.solo())])
def test_a_missing_horovod_names_the_script(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare ModuleNotFoundError, which leads to `pip install horovod`, which fails."""
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"scripts/install_horovod\.sh"):
        use()


@pytest.mark.horovod
def test_it_says_what_to_start() -> None:
    """Horovod's own ValueError, or a process that waits for others."""
    with pytest.raises(RuntimeError, match="horovodrun"):
        HorovodTransport()


def test_places_of_ranks_on_hosts() -> None:
    """Local and cross ranks; ranks of a host need not follow each other."""
    assert places(["a"]) == [Place(0, 1, 0, 1)]
    assert places(["a", "b", "a"]) == [Place(0, 2, 0, 2), Place(0, 1, 1, 2), Place(1, 2, 0, 1)]


def test_a_host_that_others_cannot_find_is_named() -> None:
    """Horovod would end all processes without a word."""
    require_reachable({"one": "127.0.1.1"})  # alone: its ranks find each other
    require_reachable({"one": "10.0.0.1", "two": "10.0.0.2"})
    with pytest.raises(RuntimeError, match=r"'two'.*has no address.*/etc/hosts"):
        require_reachable({"one": "10.0.0.1", "two": None})
    with pytest.raises(RuntimeError, match=r"'two'.*address 127\.0\.1\.1.*/etc/hosts"):
        require_reachable({"one": "10.0.0.1", "two": "127.0.1.1"})


def _started_twice(rank: int) -> list[Any]:
    control = TorchTransport.world()
    before = dict(os.environ)
    seen = []
    for _ in range(2):
        seen.append(start_horovod(control))
        seen.append(start_horovod(control))  # runs already: not this call's to stop
        total = torch.ones(1)
        HorovodTransport().all_reduce(total, key="total").wait()
        seen.append(total.item())
        stop_horovod()
        seen.append(load_horovod().is_initialized())
    return [*seen, dict(os.environ) == before]


@pytest.mark.horovod
def test_it_starts_and_stops_as_often_as_one_likes() -> None:
    """A second fit in one process, or variables that stay for what it launches later."""
    expected = [True, False, 2.0, False] * 2 + [True]
    assert run_ranks(_started_twice) == [expected] * 2


@pytest.mark.horovod
def test_with_a_cycle_time_it_stays() -> None:
    """Horovod's segmentation fault at a second start."""
    ended = run([sys.executable, "-c", _STARTED_TWICE])
    assert ended.code == 0, ended.output
    assert "STARTED True\nSTARTED False" in ended.output


_STARTED_TWICE = """
import os
os.environ["HOROVOD_CYCLE_TIME"] = "2"
from lightning_mgwfbp.exchange.horovod_rendezvous import start_horovod, stop_horovod
from lightning_mgwfbp.exchange.transport import LoopbackTransport, in_background
for _ in range(2):
    print("STARTED", start_horovod(LoopbackTransport.solo()))
    stop_horovod()
"""


@pytest.mark.horovod
def test_under_horovodrun_it_takes_horovodruns_ranks() -> None:
    """A second rendezvous beside the one that horovodrun has made."""
    horovodrun = [str(Path(sys.executable).with_name("horovodrun")), "-np", "2", "--gloo"]
    ended = run([*horovodrun, sys.executable, "-c", _LAUNCHED], MASTER_ADDR="127.0.0.1")
    assert ended.code == 0, ended.output
    assert ended.output.count("RESULT 2.0") == 2


@pytest.mark.horovod
def test_mpirun_needs_a_horovod_that_knows_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process trains alone, as rank 0 of 1."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setattr(load_horovod(), "mpi_built", lambda: False)
    with pytest.raises(RuntimeError, match="HOROVOD_WITH_MPI=1"):
        start_horovod(LoopbackTransport.solo())


_LAUNCHED = """
import os, torch
import torch.distributed as dist
from lightning_mgwfbp.exchange.horovod_rendezvous import start_horovod, stop_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
dist.init_process_group("gloo", rank=rank, world_size=size)
start_horovod(TorchTransport.world())
total = torch.ones(1)
HorovodTransport().all_reduce(total, key="total").wait()
print("RESULT", total.item())
stop_horovod()
dist.destroy_process_group()
"""


def _half_the_ranks(rank: int) -> str:
    control = TorchTransport.world()
    alone = [dist.new_group([r]) for r in range(2)][rank]
    start_horovod(TorchTransport(alone))  # as a launcher that knows of one process only
    try:
        start_horovod(control)
    except RuntimeError as error:
        return str(error)
    finally:
        stop_horovod()
    return ""


@pytest.mark.horovod
def test_another_idea_of_the_ranks_is_an_error() -> None:
    """Two trainings that believe to be one."""
    for message in run_ranks(_half_the_ranks):
        assert "[(0, 1), (0, 1)], not [(0, 2), (1, 2)]" in message


def _one_key_for_all(transport: HorovodTransport) -> list[Any]:
    other = HorovodTransport()
    total, theirs, gathered = torch.ones(1), torch.ones(1), torch.empty(2, 1)
    mine = torch.tensor([float(transport.rank)])
    pending = [
        transport.all_reduce(total, key="bucket 0"),
        other.all_reduce(theirs, key="bucket 0"),
        transport.all_gather(gathered, mine, key="bucket 0"),
    ]
    for p in reversed(pending):
        p.wait()
        p.wait()  # again: done
    return [total.item(), theirs.item(), gathered.flatten().tolist()]


@pytest.mark.horovod
def test_kinds_of_collectives_and_transports_have_names_of_their_own() -> None:
    """Two optimizers' buckets, or a bucket's dense and sparse part, meet each other's."""
    assert on_horovod_ranks(_one_key_for_all) == [[2.0, 2.0, [0.0, 1.0]]] * 2


def _misuse(transport: HorovodTransport) -> list[str]:
    messages = []

    def expect_error(*buffers: torch.Tensor) -> None:
        try:
            pending = [transport.all_reduce(b, key="bucket 7") for b in buffers]
            for p in pending:
                p.wait()
        except RuntimeError as error:
            messages.append(str(error))

    expect_error(torch.ones(3 + transport.rank))
    expect_error(torch.ones(1), torch.ones(1))
    transport.barrier(key="afterwards it goes on")
    return messages


@pytest.mark.horovod
def test_errors_name_the_key_and_what_to_do() -> None:
    """Horovod's own words, which know neither."""
    for of_other_sizes, in_flight in on_horovod_ranks(_misuse):
        assert "bucket 7" in of_other_sizes
        assert "must run the same model and options" in of_other_sizes
        assert "bucket 7" in in_flight
        assert "must be waited for first" in in_flight


def _never_called(transport: HorovodTransport) -> str:
    impatient = HorovodTransport(timeout=timedelta(seconds=0.5))
    message = ""
    if transport.rank == 0:
        with pytest.raises(RuntimeError) as error:
            impatient.all_reduce(torch.ones(1), key="bucket 7").wait()
        message = str(error.value)
    dist.barrier()
    return message


@pytest.mark.horovod
def test_a_rank_that_calls_nothing_ends_the_others() -> None:
    """Horovod warns once a minute, for ever."""
    message, _ = on_horovod_ranks(_never_called)
    assert "bucket 7" in message
    assert "within 0.5 s" in message


def _dies(transport: HorovodTransport) -> None:
    transport.barrier(key="all are here")
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    transport.all_reduce(torch.ones(1), key="bucket 7").wait()


@pytest.mark.horovod
def test_a_killed_rank_ends_the_others() -> None:
    """A hang, or Horovod's words without what to do."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"(?s)rank 0.*bucket 7.*cannot go on without it"):
        on_horovod_ranks(_dies)
    assert time.monotonic() - begin < 60.0


def _narrow(transport: HorovodTransport) -> list[str]:
    _warn_of_bfloat16.cache_clear()  # this process may have said it in an earlier test
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(2):
            transport.all_reduce(torch.ones(1, dtype=torch.bfloat16), key=f"{i}").wait()
    return [str(w.message) for w in caught]


@pytest.mark.horovod
def test_bfloat16_is_warned_of_once() -> None:
    """Twice the bytes unsaid, or said at every step."""
    for messages in on_horovod_ranks(_narrow):
        assert len(messages) == 1
        assert "float32" in messages[0]


def _timed(transport: HorovodTransport) -> list[Any]:
    quick = {"largest_nbytes": 4096, "budget_seconds": 0.5}
    return [time_all_reduce(transport, **quick), time_all_gather(transport, **quick)]


@pytest.mark.horovod
def test_its_link_is_measured_on_itself() -> None:
    """A fit of another transport's link, or ranks that know different times."""
    ours, theirs = on_horovod_ranks(_timed)
    assert ours == theirs
    for samples in ours:
        assert len(samples) >= 2
        assert all(seconds > 0 for _, seconds in samples)


def _looks(transport: HorovodTransport) -> list[int]:
    """How often rank 0 looks for the end of what rank 1 starts late: in front, in background."""
    counts = []
    for wait_in in (_call, _call_in_thread):
        if transport.rank == 1:
            time.sleep(0.3)
        pending = transport.all_reduce(torch.zeros(1), key=wait_in.__name__)
        counts.append(0)
        poll = pending._hvd.poll

        def counted(handle: int, poll: Any = poll) -> bool:
            counts[-1] += 1
            return bool(poll(handle))

        pending._hvd = SimpleNamespace(poll=counted, synchronize=pending._hvd.synchronize)
        wait_in(pending.wait)
    return counts


def _call(wait: Callable[[], None]) -> None:
    wait()


def _call_in_thread(wait: Callable[[], None]) -> None:
    def wait_patiently() -> None:
        in_background.set(True)
        wait()

    thread = threading.Thread(target=wait_patiently)
    thread.start()
    thread.join()


@pytest.mark.horovod
def test_a_thread_in_the_background_looks_less_often() -> None:
    """It takes a tenth of a core from backward."""
    in_front, behind = on_horovod_ranks(_looks)[0]
    assert 1 <= behind < in_front / 3
