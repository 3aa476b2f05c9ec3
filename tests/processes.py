"""Start a program as a user would, wait for it within a limit, and see what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ranks import free_port

PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True)
class Ended:
    """A session of processes that has ended."""

    code: int
    output: str
    orphans: list[int]


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """Start `command` in a session of its own, free of what an outer launcher may have set."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK")}
    return subprocess.Popen(
        command,
        env={**inherited, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port()), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], limit_seconds: float = 90.0) -> Ended:
    """Wait for `process`; kill what is left of its session and say what that was."""
    try:
        output, _ = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end within {limit_seconds:.0f} s:\n{output[-3000:]}") from None
    deadline = time.monotonic() + 5.0
    while (orphans := members(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for orphan in orphans:
        os.kill(orphan, signal.SIGKILL)
    return Ended(process.returncode, output, orphans)


def run(command: list[str], **environment: str) -> Ended:
    return finish(start(command, **environment))


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / program), *arguments]


def members(leader: int) -> list[int]:
    """Living processes of the session that `leader` began."""
    members = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in ("Z", "X"):
                members.append(int(entry.name))
    return members
