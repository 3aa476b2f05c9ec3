"""A failure here means: a rank that dies leaves the others waiting, or without a word of why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from subprocess import Popen
from typing import Any

import lightning.pytorch as pl
import pytest
from processes import Ended, finish, members, python, start
from ranks import free_port, train_ranks
from torch import Tensor
from training import Drawn, ToyData, assert_same, make_strategy, quiet_trainer

pytestmark = pytest.mark.slow
TIMEOUT = 5.0
LAUNCHED_TIMEOUT = 15.0  # it holds for the start, too, and Lightning starts rank 1 late
each = pytest.mark.parametrize(
    "options",
    [
        {"transport": "torch"},
        pytest.param({"transport": "horovod"}, marks=pytest.mark.horovod),
        {"schedule": "cross_iteration"},
        {"compressor": "topk"},
    ],
    ids=["torch", "horovod", "cross_iteration", "topk"],
)


def started(**options: Any) -> list[Popen[str]]:
    """Two ranks, started as a scheduler would."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = python("fit.py", json.dumps(options))
    return [start(command, LOCAL_RANK=str(i), NODE_RANK="0", **shared) for i in range(2)]


def endless(folder: Path, timeout: float = TIMEOUT, **strategy: Any) -> dict[str, Any]:
    """Options of a training that only a fault ends."""
    return {
        "trainer": {"max_steps": -1, "max_epochs": -1},
        "strategy": {"planner": "wfbp", "warmup_steps": 2, **strategy},
        "save_dir": str(folder),
        "timeout": timeout,
    }


def wait_for_plan(folder: Path, process: Popen[str]) -> None:
    """Return when the training, which `process` takes part in, is in full swing."""
    deadline = time.monotonic() + 60.0
    while not (folder / "plan.json").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"no plan was made:\n{process.communicate()[0][-3000:]}")
        time.sleep(0.05)
    time.sleep(0.2)


def finish_soon(survivor: Popen[str], timeout: float = LAUNCHED_TIMEOUT) -> Ended:
    """It ends by itself, within the timeout and 10 s."""
    return finish(survivor, limit_seconds=timeout + 10.0)


def assert_explained(survivor: Ended, cause: str, options: dict[str, str] | None = None) -> None:
    """It has ended with an error that says what it waited for, whose fault it was, what to do."""
    assert survivor.code != 0
    assert not survivor.orphans
    said = survivor.output.split("Traceback", 1)[1]
    # there is none where the timeout has passed in a broadcast of Lightning's
    assert "merge group" in said or "Nothing came within the timeout" in said
    assert cause in said
    assert "read the other ranks' output first" in said
    if options is not None and options.get("transport") == "horovod":
        assert "Horovod cannot go on without it" in said


@each
def test_a_killed_rank_ends_the_others_with_a_named_merge_group(
    options: dict[str, str], tmp_path: Path
) -> None:
    """SIGKILL in the middle of training, after the plan."""
    ranks = started(**endless(tmp_path, **options))
    wait_for_plan(tmp_path, ranks[0])
    ranks[1].kill()
    survivor = finish_soon(ranks[0], TIMEOUT)
    finish(ranks[1])
    host = os.uname().nodename
    assert_explained(survivor, f"Rank 1 (on {host}) has ended, is stopped, or", options)


@each
def test_a_rank_that_raises_ends_the_others(options: dict[str, str]) -> None:
    """An error of one rank's own, whose teardown must not wait for the others, nor they for it."""
    ranks = started(strategy={"planner": "wfbp", "warmup_steps": 2, **options}, raises=1)
    survivor, raised = (finish(rank, limit_seconds=60.0) for rank in ranks)
    assert raised.code != 0
    assert not raised.orphans
    assert "ValueError: rank 1 raises" in raised.output
    assert_explained(survivor, "ended with ValueError: rank 1 raises", options)


def start_launching(folder: Path, **options: Any) -> Popen[str]:
    """Rank 0, which starts rank 1."""
    settings = {**endless(folder, LAUNCHED_TIMEOUT), **options}
    return start(python("fit.py", json.dumps(settings)))


def launched(folder: Path) -> tuple[Popen[str], int]:
    """Rank 0, and the process id of rank 1, which it has started; in the middle of training."""
    main = start_launching(folder)
    wait_for_plan(folder, main)
    (child,) = (pid for pid in members(main.pid) if pid != main.pid)
    return main, child


def test_a_launched_rank_is_killed(tmp_path: Path) -> None:
    """The main process is left the time to say so."""
    main, child = launched(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert_explained(finish_soon(main), "has ended, is stopped, or cannot be reached")


def test_a_launched_rank_raises(tmp_path: Path) -> None:
    """Both errors are there to read."""
    ended = finish(start_launching(tmp_path, raises=1))
    assert "ValueError: rank 1 raises" in ended.output
    assert_explained(ended, "ended with ValueError: rank 1 raises")


def test_a_launched_rank_is_stopped(tmp_path: Path) -> None:
    """The main process ends it by force when it has lost patience."""
    main, child = launched(tmp_path)
    os.kill(child, signal.SIGSTOP)
    ended = finish_soon(main)
    assert_explained(ended, "has ended, is stopped, or cannot be reached")


def test_the_launching_rank_is_killed(tmp_path: Path) -> None:
    """Nobody is left to look after the others: they end by themselves."""
    main, _ = launched(tmp_path)
    main.kill()
    ended = finish_soon(main)
    assert_explained(ended, "Rank 0, or the host that keeps its store, has ended")


def test_the_launching_rank_raises(tmp_path: Path) -> None:
    """The others hear why before it takes the store with it."""
    ended = finish(start_launching(tmp_path, raises=0))
    assert "ValueError: rank 0 raises" in ended.output
    assert_explained(ended, "ended with ValueError: rank 0 raises")


def interrupt(main: Popen[str]) -> None:
    main.send_signal(signal.SIGINT)


def interrupt_all(main: Popen[str]) -> None:
    """As a terminal does on Ctrl-C."""
    os.killpg(main.pid, signal.SIGINT)


@pytest.mark.parametrize("how", [interrupt, interrupt_all])
def test_ctrl_c_ends_all_ranks(how: Callable[[Popen[str]], None], tmp_path: Path) -> None:
    """KeyboardInterrupt, in the main process only or in all."""
    main, _ = launched(tmp_path)
    how(main)
    ended = finish_soon(main)
    assert ended.code == 1
    assert not ended.orphans
    assert "Detected KeyboardInterrupt" in ended.output


def test_sigterm_ends_all_ranks(tmp_path: Path) -> None:
    """As a scheduler ends a job early; Lightning passes it on to the ranks it has started."""
    main, _ = launched(tmp_path)
    main.send_signal(signal.SIGTERM)
    ended = finish_soon(main)
    assert not ended.orphans
    assert ended.code in (0, 128 + signal.SIGTERM)  # a SystemExit of Lightning's


class RaisesOnce(Drawn):
    """In one of its steps, on all ranks."""

    has_raised = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.global_step == 7 and not self.has_raised:
            self.has_raised = True
            raise ValueError("on all ranks")
        return super().training_step(batch, batch_idx)


def fit_twice(_: int, name: str, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """What a fit leads to that goes on after an exception, with the same Trainer."""
    pl.seed_everything(7, verbose=False)
    module, data = RaisesOnce(), ToyData()
    trainer = quiet_trainer(strategy=make_strategy(name, **kwargs), max_steps=20)
    with pytest.raises(ValueError, match="on all ranks"):
        trainer.fit(module, data)
    trainer.fit(module, data)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
def test_fit_goes_on_after_an_exception(schedule: str) -> None:
    """Hooks, threads or pending steps of the first fit are left over in the second."""
    ours = {"schedule": schedule, "warmup_steps": 2, "planner": "wfbp"}
    expected = train_ranks(fit_twice, "ddp", {})
    for reached, as_ddp in zip(train_ranks(fit_twice, "mgwfbp", ours), expected, strict=True):
        assert_same(reached, as_ddp)
