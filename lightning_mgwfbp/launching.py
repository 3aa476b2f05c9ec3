"""Lightning's launcher of ranks as scripts, with an eye on how they end.

Lightning's own kills the main process within 5 s of the death of a child, often before it could
say why; and where the main process ends with an error, a child that is stopped stays for ever.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from typing_extensions import override

# For ranks that have lost another one: to find out which, write their traceback, and end.
GRACE_SECONDS = 8.0


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts one process per device of this host, and leaves none of them behind."""

    _failed: ClassVar[bool] = False
    """Whether the last call ended with an error, by whichever Trainer of this process."""

    @override
    def launch(
        self,
        function: Callable[..., Any],
        *args: Any,
        trainer: pl.Trainer | None = None,
        **kwargs: Any,
    ) -> Any:
        environment = self.cluster_environment
        environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not environment.creates_processes_externally:
            self._call_children_scripts()
            name = "lightning_mgwfbp children"
            threading.Thread(
                target=_end_with_children, args=(self.procs,), name=name, daemon=True
            ).start()
            atexit.register(self._end_children)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        ScriptLauncher._failed = True
        result = function(*args, **kwargs)
        ScriptLauncher._failed = False
        return result

    def _end_children(self) -> None:
        """After an error children end with one of their own, unless they are stopped."""
        if self._failed:
            _kill_after(GRACE_SECONDS, self.procs)


def _end_with_children(children: Sequence[subprocess.Popen[Any]]) -> None:
    """Once a child has died, have this process and the others end, by force if need be."""
    while not any(child.poll() for child in children):
        if all(child.poll() == 0 for child in children):
            return
        time.sleep(0.5)
    time.sleep(GRACE_SECONDS)
    _kill_after(0.0, children)
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_after(grace_seconds: float, children: Sequence[subprocess.Popen[Any]]) -> None:
    deadline = time.monotonic() + grace_seconds
    for child in children:
        while child.poll() is None and time.monotonic() < deadline and not _is_stopped(child.pid):
            time.sleep(0.05)
        if child.poll() is None:
            child.kill()
            child.wait()


def _is_stopped(process: int) -> bool:
    """Whether it cannot end by itself; not known but on Linux."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "T"
    return False
