"""One process per rank, started together and ended together.

The ranks find each other by the environment variables that torchrun sets, so whatever runs under
torchrun runs here. If one rank fails, the others are ended at once rather than left waiting.
"""

import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import IO


def rank_environment(
    rank: int, world_size: int, *, address: str, port: int, interface: str, local_rank: int = 0
) -> dict[str, str]:
    """torchrun's variables for one rank, one compute thread, and gloo's network interface.

    Args:
        address, port: where rank 0 listens.
        interface: the network device that reaches the other ranks.
        local_rank: this rank's place among those of its host; 0 where every host has one rank.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(rank - local_rank),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
    }


def run_on_loopback(commands: Sequence[Sequence[str]], timeout: float | None = None) -> list[str]:
    """Run `commands[i]` as rank i of one host, over its unshaped loopback: see `run_ranks`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environments = [
        rank_environment(
            rank, len(commands), address="127.0.0.1", port=port, interface="lo", local_rank=rank
        )
        for rank in range(len(commands))
    ]
    return run_ranks(commands, environments, timeout)


def run_ranks(
    commands: Sequence[Sequence[str]],
    environments: Sequence[Mapping[str, str]],
    timeout: float | None = None,
) -> list[str]:
    """Run `commands[i]` with `environments[i]` added to this process's own, all at once.

    Args:
        timeout: seconds after which all are ended; None waits for ever.

    Returns:
        What each wrote to its standard output; standard error passes through.

    Raises:
        RuntimeError: if one ends with an error, or the time is up. No process is left behind then,
            nor after Ctrl-C.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as ends:
        # Files, because unread pipes would fill up and block their writers.
        outputs = [ends.enter_context(tempfile.TemporaryFile()) for _ in commands]
        for command, environment, output in zip(commands, environments, outputs, strict=True):
            process = subprocess.Popen(
                command,
                stdout=output,
                env={**os.environ, **environment},
                start_new_session=True,  # so that `_end` reaches the children's children too
            )
            ends.callback(_end, process)
            processes.append(process)
        _wait(processes, timeout)
        return [_text(output) for output in outputs]


def _wait(processes: Sequence[subprocess.Popen[bytes]], timeout: float | None) -> None:
    """Return when all have ended well; raise as soon as one has not, or the time is up."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise RuntimeError(
                    f"rank {rank} of {len(processes)} ended with exit code {code} "
                    f"(its standard error is above); the others were ended."
                )
        if None not in codes:
            return
        if deadline is not None and time.monotonic() > deadline:
            running = [rank for rank, code in enumerate(codes) if code is None]
            raise RuntimeError(f"ranks {running} still ran after {timeout} s and were ended.")
        time.sleep(0.05)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process's whole session, if anything of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode()
