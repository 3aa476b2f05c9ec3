"""When does forward first use each parameter? Timed inside real training steps.

A parameter is taken to be used when a module that holds it is called. A hook before every module's
forward notes the time, by one of the `clocks`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_mgwfbp.measure.clocks import Instant, clock_of, seconds_between
from lightning_mgwfbp.measure.module_hooks import Compiling, is_compiled


class ForwardProfiler:
    """Records, for every forward between `begin` and `end`, when each parameter was first used.

    Where something is compiled it records only how long forwards are.

    Args:
        module: whose forward is watched, with all modules in it.
        named_parameters: those of its parameters that are to be watched.
    """

    def __init__(
        self, module: nn.Module, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        self._module = module
        self.set_parameters(named_parameters)
        self._now = clock_of(next(iter(self._parameters), None))
        self._meets_compiled = False
        self._hook: RemovableHandle | None = None  # [Note: forward hooks]
        self._compiling: Compiling | None = None
        self._forwards: list[_Forward] = []
        self._current: _Forward | None = None

    def set_parameters(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Watch these from the next forward on."""
        named = list(named_parameters)
        self._parameters = [p for _, p in named]  # as long as these live, their ids are theirs
        self._name_of = {id(p): name for name, p in named}

    def begin(self) -> None:
        """Say that a forward begins now; one that did not end is dropped."""
        self.drop()
        if not (self._meets_compiled or any(map(is_compiled, self._module.modules()))):
            self._hook = register_module_forward_pre_hook(self._on_call)
            self._compiling = Compiling(self._before_compiling)
        self._current = _Forward(self._now())

    def end(self) -> None:
        """Say that the forward is over: what is called until the next one (by validation, or by a
        checkpoint that is computed again in backward) does not count."""
        if self._current is not None:
            self._current.end = self._now()
            self._forwards.append(self._current)
            self.drop()

    def drop(self) -> None:
        """Record no more of the present forward, if there is one."""
        self._current = None
        if self._hook is not None and self._compiling is not None:
            self._hook.remove()
            self._compiling.close()

    def forget(self) -> None:
        """Drop what was recorded (the first step, in which memory and caches are still cold)."""
        self._forwards.clear()

    def first_use_seconds(self) -> dict[str, float]:
        """Return the median time from the beginning of forward to each first use, by name.

        In the order of use. Of a parameter that was never seen to be used, because no module that
        holds it was called, nothing is known: it is taken to be used at once, and comes first.
        """
        times: dict[str, list[float]] = {name: [] for name in self._name_of.values()}
        for forward in self._forwards:
            for name, seconds in forward.seconds().items():
                times[name].append(seconds)
        medians = {name: statistics.median(t) if t else 0.0 for name, t in times.items()}
        return dict(sorted(medians.items(), key=lambda item: item[1]))

    def forward_seconds(self) -> float:
        """Return the median time of a forward; 0 if none was recorded."""
        ends = [seconds_between(f.begin, f.end) for f in self._forwards if f.end is not None]
        return statistics.median(ends) if ends else 0.0

    def _before_compiling(self) -> None:
        self._meets_compiled = True
        if self._hook is not None:
            self._hook.remove()

    def _on_call(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or self._current is None:
            return
        own = map(id, module._parameters.values())
        names = [self._name_of[i] for i in own if i in self._name_of]
        if names:
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
