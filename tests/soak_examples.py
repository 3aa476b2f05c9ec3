"""Long trainings of something tiny, and what a process holds in the meantime."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer

LAYERS = 4


@dataclass(frozen=True)
class Footprint:
    """What a process holds after a collection."""

    rss_nbytes: int
    tensors: int
    objects: int  # that gc tracks
    threads: int
    files: int
    process_groups: int


def footprint() -> Footprint:
    gc.collect()
    objects = gc.get_objects()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Footprint(
        rss_nbytes=pages * os.sysconf("SC_PAGE_SIZE"),
        tensors=sum(issubclass(type(o), Tensor) for o in objects),
        objects=len(objects),
        threads=len(os.listdir("/proc/self/task")),
        files=len(os.listdir("/proc/self/fd")),
        process_groups=len(dist.distributed_c10d._world.pg_map),
    )


# What malloc loses to fragments; what a plan in force has more than one in the making; caches of
# the interpreter; a thread that the next exchange starts. What leaks does so hundreds of times.
_SLACK = {"rss_nbytes": 4 << 20, "tensors": 12, "objects": 80, "threads": 1}


def assert_no_growth(before: Footprint, after: Footprint) -> None:
    for field in fields(Footprint):
        most = getattr(before, field.name) + _SLACK.get(field.name, 0)
        assert getattr(after, field.name) <= most, f"{field.name}: {before}, and then {after}"


class Layers(nn.Module):
    """Independent layers, of which each forward uses some, some of them twice."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for _ in range(LAYERS))

    def forward(self, data: Tensor, used: Sequence[int]) -> Tensor:
        data = data.to(self.layers[0].weight.dtype)
        return torch.stack([self.layers[i](data).tanh().square().mean() for i in used]).sum()


@dataclass(frozen=True)
class Step:
    """One optimizer step, or none, the same on all ranks but for what each uses."""

    frozen: frozenset[int]
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]  # of each, on each rank: layers
    overflows: bool
    clips: bool
    is_taken: bool
    set_to_none: bool


class Steps:
    """Draws steps without end, the same ones on all ranks."""

    def __init__(self, seed: int, world_size: int = 2) -> None:
        self._random = random.Random(seed)
        self._world_size = world_size
        self._frozen: frozenset[int] = frozenset()

    def draw(self) -> Step:
        chance = self._random.random
        if chance() < 0.005:  # 100 exchanges in a row frozen ones stay in the plan
            self._frozen = frozenset(i for i in range(LAYERS) if chance() < 0.4)
            if len(self._frozen) == LAYERS:
                self._frozen = frozenset()
        count = self._random.choice((0, 1, 1, 1, 2, 3))
        return Step(
            self._frozen,
            tuple(tuple(map(self._used, range(self._world_size))) for _ in range(count)),
            overflows=chance() < 0.03,
            clips=chance() < 0.1,
            is_taken=chance() < 0.9,
            set_to_none=chance() < 0.9,
        )

    def whole(self) -> Step:
        """A step that leaves nothing out, so that footprints after it can be compared."""
        self._frozen = frozenset()
        every = tuple(range(LAYERS))
        return Step(frozenset(), ((every,) * self._world_size,), False, False, True, True)

    def _used(self, rank: int) -> tuple[int, ...]:
        trainable = [i for i in range(LAYERS) if i not in self._frozen]
        # a loss that needs no parameter that is trainable has no backward
        certain = self._random.choice(trainable)
        others = [i for i in range(LAYERS) if self._random.random() < 0.7]
        return (certain, *others)


class Training:
    """A model that is called through `wrapper`, and what steps it.

    Args:
        scaler: of its losses, if any.
        books: told of each step and of its averages, if given.
    """

    def __init__(
        self,
        model: Layers,
        wrapper: Any,
        optimizer: Any,
        scaler: torch.amp.GradScaler | None = None,
        books: Books | None = None,
    ) -> None:
        self.model, self.wrapper, self.optimizer = model, wrapper, optimizer
        self.scaler, self.books = scaler, books
        self.is_merged = isinstance(optimizer, MergedOptimizer)
        self.no_sync = optimizer.no_sync if self.is_merged else wrapper.no_sync

    def step(self, step: Step, rank: int, seed: int) -> None:
        for i, layer in enumerate(self.model.layers):
            layer.requires_grad_(i not in step.frozen)
        self.optimizer.zero_grad(set_to_none=step.set_to_none)
        if self.books is not None:
            self.books.begin_step()
        generator = torch.Generator().manual_seed(2 * seed + rank)
        for number, used in enumerate(step.micro_batches, start=1):
            with nullcontext() if number == len(step.micro_batches) else self.no_sync():
                data = torch.randn(2, 4, generator=generator)
                loss = self.wrapper(data, used[rank])
                if step.overflows and rank == 0:
                    loss = loss * torch.inf
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        is_taken = step.is_taken and bool(step.micro_batches)
        if self.books is not None:
            layout = self.optimizer.reducer.layout
            self.optimizer.synchronize()
            self.books.enter_averages()
            # The next zero_grad throws these averages away, and what they have left behind, unless
            # that was laid out anew.
            if not is_taken and layout is self.optimizer.reducer.layout:
                self.books.cross_out()
        if is_taken:
            self._update(step)

    def _update(self, step: Step) -> None:
        if self.scaler is None:
            self.optimizer.step()
            return
        if step.clips:
            if self.is_merged:
                self.optimizer.synchronize()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(self.optimizer)
        self.scaler.update()


class Books:
    """What a rank has put in, and received, by parameter."""

    def __init__(self, model: Layers) -> None:
        self._model = model
        self.given = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        self.received = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.register_hook(partial(_enter, self.given[name]))

    def begin_step(self) -> None:
        """Remember what has been entered so far."""
        self._before = [{n: t.clone() for n, t in e.items()} for e in (self.given, self.received)]

    def cross_out(self) -> None:
        """Take back what was entered since the step began."""
        for entered, before in zip((self.given, self.received), self._before, strict=True):
            for name, total in before.items():
                entered[name].copy_(total)

    def enter_averages(self) -> None:
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                self.received[name] += parameter.grad


def _enter(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)  # and nothing is returned, which would take the gradient's place
