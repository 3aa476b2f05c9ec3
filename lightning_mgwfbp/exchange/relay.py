"""`Relay`: a thread between the two halves of decoupled exchanges.

All-gathers have one order, the same on all ranks. The next one goes when its own reduce-scatter is
done and few others are under way here; when that is, each rank decides for itself, at the moment.
So a reduce-scatter, which backward launches as soon as it can, finds little before it on the link.
(Were none sent while a reduce-scatter is under way, the link would idle wherever one rank is ahead
of another in backward: its reduce-scatters are under way, but the other's are not yet.)
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from queue import Empty, SimpleQueue
from weakref import WeakSet

import torch

from lightning_mgwfbp.exchange.transport import Pending, in_background

# Enough to keep the link busy, and soon out of a reduce-scatter's way.
_MOST_UNDER_WAY = 2
_LEAVE_SECONDS = 5.0  # other ranks may wait for this one to be gone


class Relay:
    """A thread that waits for reduce-scatters and launches all-gathers, round after round.

    Args:
        needed: by each all-gather of a round, in their order: how many reduce-scatters come first.
        launch: launches the all-gather of that turn.
        fail: told the error that has ended the thread.
        device: where the pieces lie.
    """

    def __init__(
        self,
        needed: Sequence[int],
        launch: Callable[[int], Pending],
        fail: Callable[[BaseException], None],
        device: torch.device,
    ) -> None:
        self._needed = needed
        self._launch = launch
        self._fail = fail
        self._device = device
        self._scattered: SimpleQueue[Pending | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name="lightning_mgwfbp all-gathers", daemon=True
        )
        self._thread.start()
        _running.add(self)

    def put(self, pending: Pending) -> None:
        """Tell of the next reduce-scatter, which has been launched."""
        self._scattered.put(pending)

    def stop(self) -> None:
        """End the thread.

        It first goes as far in the order as what was put allows. Were all-gathers left out, other
        ranks would wait for them, and this one, perhaps, for those ranks' reduce-scatters.
        """
        _running.discard(self)
        self._end()
        with suppress(Empty):
            while True:
                pending = self._scattered.get_nowait()
                if pending is not None:  # it comes after what has failed
                    with suppress(Exception):
                        pending.wait()

    def _end(self, limit_seconds: float | None = None) -> None:
        self._scattered.put(None)
        self._thread.join(limit_seconds)

    def _run(self) -> None:
        in_background.set(True)
        # on a GPU waits are queued in the current stream: not in that of backward
        on_gpu = self._device.type == "cuda"
        stream = torch.cuda.stream(torch.cuda.Stream(self._device)) if on_gpu else nullcontext()
        try:
            with stream:
                while self._run_round():
                    pass
        except BaseException as error:
            self._fail(error)

    def _run_round(self) -> bool:
        """Return whether there may be another one."""
        done = 0  # reduce-scatters, as many as all-gathers in all
        under_way: deque[Pending] = deque()  # all-gathers
        for turn, needed in enumerate(self._needed):
            while done < needed:
                if not self._wait_for_next():
                    return False
                done += 1
            if len(under_way) == _MOST_UNDER_WAY:
                under_way.popleft().wait()
            under_way.append(self._launch(turn))
        return True

    def _wait_for_next(self) -> bool:
        pending = self._scattered.get()  # let go of on return: it keeps the bucket's memory
        if pending is None:
            return False
        pending.wait()
        return True


_running: WeakSet[Relay] = WeakSet()


@atexit.register  # once: of one that is unregistered Python keeps the place
def _end_all() -> None:
    """An interpreter that ends while a thread comes back from a collective aborts."""
    for relay in list(_running):
        relay._end(_LEAVE_SECONDS)
