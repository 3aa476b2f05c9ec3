"""`RollCall`: which ranks are missing, and why, found out through torch.distributed's store.

A collective that fails says neither which rank it waited for nor what became of that one. So every
rank listens for calls, in a thread that looks once a second. A rank in trouble calls the roll: who
answers is alive, whatever else it waits for; who does not has ended, is stopped, or is cut off.
A rank that ends with an error of its own tells the others what it was.

The store is kept by rank 0, or by torchrun's agent on its host; where it is gone, so are they.
"""

from __future__ import annotations

import atexit
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_mgwfbp.exchange.transport import Transport

_LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 2.5
_STORE_SECONDS = 1.0  # for the store's own answers, beyond that
_MOST_NAMED = 8
_LAST_WORDS = ("ended", "failed")  # of a rank that may be gone by now
_SILENT = "has ended, is stopped, or cannot be reached"


class RollCall:
    """This rank's part in the roll calls of one training. Collective to make.

    Args:
        store: torch.distributed's.
        rank, world_size: in the default process group.
        number: of the training; in one store there may be several, one after another.

    Attributes:
        end_is_wanted: whether a rank has asked rank 0 to end the training.
        last_batch: after which all ranks are to end, once that is set.
    """

    doing: ClassVar[str] = ""
    """What this process is exchanging at the moment; empty: nothing."""

    _open: ClassVar[list[RollCall]] = []

    def __init__(self, store: dist.Store, rank: int, world_size: int, number: int) -> None:
        self._default_store = store
        # a connection of its own: the other may be waited on
        self._store = store.clone()  # type: ignore[attr-defined]
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._prefix = f"lightning_mgwfbp/roll of training {number}"
        self._says = ""  # in the place of what it is doing
        self._heard = ""  # why another rank has ended
        self._found = ""
        self.end_is_wanted = False
        self.last_batch: int | None = None
        self._write(0)
        self._closed = threading.Event()
        self._listener = _in_background(self._listen)
        self._open.append(self)

    @classmethod
    def opened(cls, transport: Transport) -> RollCall | None:
        """The roll of the ranks of `transport`, or None if they are not torch.distributed's.

        Collective.
        """
        if not dist.is_initialized() or transport.world_size != dist.get_world_size():
            return None
        store = _get_default_store()
        number = store.add("lightning_mgwfbp/trainings", 1) if transport.rank == 0 else 0
        number = transport.broadcast_object(number, 0, key="roll call")
        return cls(store, dist.get_rank(), transport.world_size, number)

    @classmethod
    def present(cls) -> RollCall | None:
        """That of the training that goes on in this process."""
        return cls._open[-1] if cls._open else None

    def tell(self, why: str) -> None:
        """Let the other ranks know why this one ends. Takes up to 4 s."""
        self._says = f"ended with {why}"

        def call() -> None:
            cause = self._key("cause")
            if not self._store.check([cause]):
                self._store.set(cause, f"Rank {self._rank} {self._says}")
            number = self._call()
            if self._rank == 0:  # the store may go with it: not before all have heard
                self._answers(number)

        _within(_ANSWER_SECONDS + _STORE_SECONDS, call)

    def want_end(self) -> None:
        """Ask rank 0 to set the last batch."""

        def call() -> None:
            self._store.set(self._key("end is wanted"), "yes")
            self._call()

        _within(_STORE_SECONDS, call)

    def end_after(self, batch: int) -> str:
        """Let all ranks know the last batch; return who has not heard of it. Takes up to 5 s."""
        self.last_batch = batch
        _within(_STORE_SECONDS, lambda: self._store.set(self._key("last batch"), str(batch)))
        return self.missing()

    def missing(self) -> str:
        """Call the roll; return who does not answer, or nothing. Takes up to 4 s."""
        silent: list[str] = []
        reached = _within(
            _ANSWER_SECONDS + _STORE_SECONDS,
            lambda: silent.extend(f"{r} {_SILENT}" for r in self._answers(self._call())[0]),
        )
        return "; ".join(silent[:_MOST_NAMED]) if reached else self._without_store()

    def ask(self, trouble: str) -> str:
        """Call the roll because of `trouble`; return what is to be said of the other ranks.

        Takes up to 4 s, the first time.
        """
        if not self._found:
            self._says = f"failed {trouble}"
            found: list[str] = []

            def call() -> None:
                silent, others = self._answers(self._call())
                ended = [f"{r} {says}" for r, says in others.items() if says.startswith("ended")]
                said = [f"{r} {_SILENT}" for r in silent] + ended
                found.extend(said or [f"{r} {says}" for r, says in others.items()])

            if not _within(_ANSWER_SECONDS + _STORE_SECONDS, call):
                found = [self._without_store()]
            self._found = "; ".join(found[:_MOST_NAMED])
        return self._found

    def close(self) -> None:
        """Listen no more."""
        self._closed.set()
        self._listener.join(_STORE_SECONDS)  # it may never come back from a store cut off
        if self in self._open:
            self._open.remove(self)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"

    def _told(self, name: str) -> str:
        key = self._key(name)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _write(self, call: int) -> None:
        """Answer all calls up to this one."""
        doing = f"is alive and waits for {self.doing}" if self.doing else "is alive, in no exchange"
        record = [call, socket.gethostname(), self._says or doing]
        self._store.set(self._key(self._rank), json.dumps(record))

    def _call(self) -> int:
        number = self._store.add(self._key("calls"), 1)
        self._write(number)
        return number

    def _answers(self, call: int) -> tuple[list[str], dict[str, str]]:
        """Ranks that have not answered in time, and what the others say."""
        silent = dict.fromkeys(self._others, "")
        says: dict[str, str] = {}
        deadline = time.monotonic() + _ANSWER_SECONDS
        while silent and time.monotonic() < deadline:
            for rank in list(silent):
                record = self._told(str(rank))
                if not record:  # it has not come so far
                    silent[rank] = f"Rank {rank}"
                    continue
                answered, host, words = json.loads(record)
                silent[rank] = f"Rank {rank} (on {host})"
                if answered >= call or words.startswith(_LAST_WORDS):
                    says[silent.pop(rank)] = words
            time.sleep(0.05)
        return list(silent.values()), says

    def _listen(self) -> None:
        heard = 0
        with suppress(RuntimeError):  # the store is gone
            while not self._closed.wait(_LOOK_SECONDS) and self._is_current():
                calls = self._store.add(self._key("calls"), 0)
                if calls > heard:
                    self._heard = self._told("cause")
                    self.end_is_wanted = bool(self._told("end is wanted"))
                    if last := self._told("last batch"):
                        self.last_batch = int(last)
                    self._write(calls)
                    heard = calls

    def _is_current(self) -> bool:
        """Whether the process group is still the one whose store this is; not all users close."""
        return dist.is_initialized() and _get_default_store() is self._default_store

    def _without_store(self) -> str:
        return self._heard or f"Rank 0, or the host that keeps its store, {_SILENT}"


@atexit.register
def _close_all() -> None:
    for roll in list(RollCall._open):
        roll.close()


def _within(limit_seconds: float, call: Callable[[], None]) -> bool:
    """Whether `call()` came to its end in time; a store behind a cut cable never answers."""
    ended = threading.Event()

    def run() -> None:
        with suppress(RuntimeError):
            call()
            ended.set()

    _in_background(run).join(limit_seconds)
    return ended.is_set()


def _in_background(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, name="lightning_mgwfbp roll call", daemon=True)
    thread.start()
    return thread
