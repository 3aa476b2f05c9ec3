"""When does forward first use each parameter? Timed inside real training steps.

A parameter is taken to be used when a module that holds it is called. Each such module has a hook
before its forward that notes the time, by one of the `clocks`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_mgwfbp.measure.clocks import Instant, clock_of, seconds_between
from lightning_mgwfbp.measure.module_hooks import ModuleHook


class ForwardProfiler:
    """Records, for every forward between `begin` and `end`, when each parameter was first used.

    Args:
        module: whose forward is watched, with all modules in it.
        named_parameters: those of its parameters that are to be watched.
    """

    def __init__(
        self, module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        named = list(named_parameters)
        name_of = {parameter: name for name, parameter in named}  # tensors hash by identity
        self._names = list(name_of.values())
        self._now = clock_of(named[0][1] if named else None)
        self._users: list[tuple[nn.Module, list[str]]] = []
        for user in module.modules():
            # a parameter that several modules share is listed with each of them
            own = [name_of[p] for p in user.parameters(recurse=False) if p in name_of]
            if own and not isinstance(user, torch.jit.ScriptModule):  # which takes no hooks
                self._users.append((user, own))
        self._handles: list[RemovableHandle] = []
        self._forwards: list[_Forward] = []
        self._current: _Forward | None = None

    def set_parameters(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch other parameters from now on; what was recorded is dropped."""

    def attach(self) -> None:
        """Start to watch."""
        self._handles = [
            user.register_forward_pre_hook(ModuleHook(partial(self._on_call, names)))
            for user, names in self._users
        ]

    def detach(self) -> None:
        """Remove all hooks; what was recorded stays."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self) -> None:
        """Say that a forward begins now; one that did not end is dropped."""
        self._current = _Forward(self._now())

    def end(self) -> None:
        """Say that the forward is over: what is called until the next one (by validation, or by a
        checkpoint that is computed again in backward) does not count."""
        if self._current is not None:
            self._current.end = self._now()
            self._forwards.append(self._current)
            self._current = None

    def forget(self) -> None:
        """Drop what was recorded (the first step, in which memory and caches are still cold)."""
        self._forwards.clear()

    def first_use_seconds(self) -> dict[str, float]:
        """Return the median time from the beginning of forward to each first use, by name.

        In the order of use. Of a parameter that was never seen to be used, because no module that
        holds it was called, nothing is known: it is taken to be used at once, and comes first.
        """
        times: dict[str, list[float]] = {name: [] for name in self._names}
        for forward in self._forwards:
            for name, seconds in forward.seconds().items():
                times[name].append(seconds)
        medians = {name: statistics.median(t) if t else 0.0 for name, t in times.items()}
        return dict(sorted(medians.items(), key=lambda item: item[1]))

    def forward_seconds(self) -> float:
        """Return the median time of a forward; 0 if none was recorded."""
        ends = [seconds_between(f.begin, f.end) for f in self._forwards if f.end is not None]
        return statistics.median(ends) if ends else 0.0

    def _on_call(self, names: list[str]) -> None:
        if self._current is not None:
            self._current.mark(names, self._now())


class _Forward:
    def __init__(self, begin: Instant) -> None:
        self.begin = begin
        self.end: Instant | None = None
        self.marks: dict[str, Instant] = {}

    def mark(self, names: list[str], now: Instant) -> None:
        for name in names:
            self.marks.setdefault(name, now)

    def seconds(self) -> dict[str, float]:
        return {name: seconds_between(self.begin, mark) for name, mark in self.marks.items()}
