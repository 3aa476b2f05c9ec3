"""A failure here means: a launcher leaves ranks behind, or ends some that would have ended well."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_mgwfbp import launching
from lightning_mgwfbp.launching import (
    ScriptLauncher,
    _end_with_children,
    _is_stopped,
    _kill_after,
)

Child = subprocess.Popen[bytes]
Start = Callable[..., Child]
ENDLESS = ("sleep", "300")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that does not outlive the test."""
    children: list[Child] = []

    def started(*command: str) -> Child:
        children.append(subprocess.Popen(command))
        return children[-1]

    yield started
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture
def own_ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Signals with which this process would have ended itself."""
    signals: list[int] = []
    kill = os.kill

    def only_others(process: int, number: int) -> None:
        if process == os.getpid():
            signals.append(number)
        else:
            kill(process, number)

    monkeypatch.setattr(os, "kill", only_others)
    return signals


def stop(child: Child) -> None:
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)


def go_on(child: Child) -> None:
    child.send_signal(signal.SIGCONT)
    os.waitid(os.P_PID, child.pid, os.WCONTINUED | os.WNOWAIT)


def test_who_is_stopped(start: Start, tmp_path: Path) -> None:
    """A stopped process is waited for, or a running one with an odd name is not."""
    odd = tmp_path / "a) T (b"
    odd.symlink_to(str(shutil.which("sleep")))
    child = start(str(odd), "300")
    assert not _is_stopped(child.pid)
    stop(child)
    assert _is_stopped(child.pid)
    go_on(child)
    assert not _is_stopped(child.pid)
    child.kill()
    child.wait()
    assert not _is_stopped(child.pid)


def test_children_have_the_time_to_end(start: Start) -> None:
    """One that would have ended by itself is killed, or one that would not is left."""
    ending, endless = start("sleep", "0.2"), start(*ENDLESS)
    _kill_after(3.0, [ending, endless])
    assert ending.returncode == 0
    assert endless.returncode == -signal.SIGKILL


def test_a_stopped_child_is_not_waited_for(start: Start) -> None:
    """It takes all the time of those that could still end."""
    child = start(*ENDLESS)
    stop(child)
    begin = time.monotonic()
    _kill_after(60.0, [child])
    assert child.returncode == -signal.SIGKILL
    assert time.monotonic() - begin < 30.0


def test_a_child_has_failed(
    start: Start, own_ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launching process goes on without it, leaves others, or kills one too soon."""
    monkeypatch.setattr(launching, "GRACE_SECONDS", 2.0)
    ended, failing = start("true"), start("sh", "-c", "sleep 0.2; exit 1")
    ended.wait()
    ending, endless = start("sleep", "1"), start(*ENDLESS)
    _end_with_children([ended, failing, ending, endless])
    assert [failing.returncode, ending.returncode] == [1, 0]
    assert endless.returncode == -signal.SIGKILL
    assert own_ends == [signal.SIGKILL]


def test_all_children_have_ended_well(start: Start, own_ends: list[int]) -> None:
    """That counts as a failure, or keeps a thread looking for ever."""
    _end_with_children([start("true"), start("sleep", "0.7")])
    assert own_ends == []


def fail() -> None:
    raise ValueError("a rank's own")


def test_only_after_an_error_are_children_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Children are killed at the end of a training that went well, or left after an error."""
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(ScriptLauncher, "_failed", False)
    monkeypatch.setenv("LOCAL_RANK", "0")  # so that it starts none itself
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    launcher.procs = [start(*ENDLESS)]
    assert launcher.launch(int, "7", base=8) == 7
    launcher._end_children()
    assert launcher.procs[0].poll() is None
    with pytest.raises(ValueError, match="a rank's own"):
        launcher.launch(fail)
    launcher._end_children()
    assert launcher.procs[0].returncode == -signal.SIGKILL
