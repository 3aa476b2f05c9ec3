"""A failure here is a gradient that is not what the ranks accumulated since the last exchange."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from engine_examples import (
    Gradients,
    Layers,
    assert_close,
    backward,
    data_of,
    gradients,
    mean,
    plain,
    plus,
    reducer_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import on_ranks

from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.plan import MergePlan

LAYERS = 3
NAMES = tuple(name for name, _ in Layers(LAYERS).named_parameters())


@dataclass(frozen=True)
class MicroBatch:
    used: tuple[tuple[int, ...], ...]  # (ranks,): layers in the order of the forward
    no_sync: bool


@dataclass(frozen=True)
class Step:
    """Micro-batches, one exchange, and what happens to the gradients afterwards."""

    micro_batches: tuple[MicroBatch, ...]
    zero_grad: str  # "to none", "to zero" or "keep"


@dataclass(frozen=True)
class Run:
    world_size: int
    plan: MergePlan
    install_before: int  # the step before which the plan comes into force
    steps: tuple[Step, ...]


def _no_sync_first(micro_batches: list[MicroBatch]) -> tuple[MicroBatch, ...]:
    # the other order has a test of its own in test_reducer_parts.py
    return tuple(sorted(micro_batches, key=lambda m: not m.no_sync))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    world_size = draw(st.integers(2, 3))
    layers = st.lists(st.integers(0, LAYERS - 1), unique=True, max_size=LAYERS).map(tuple)
    micro_batch = st.builds(MicroBatch, st.tuples(*[layers] * world_size), st.booleans())
    step = st.builds(
        Step,
        st.lists(micro_batch, min_size=1, max_size=3).map(_no_sync_first),
        st.sampled_from(["to none", "to zero", "keep"]),
    )
    cuts = draw(st.sets(st.integers(1, len(NAMES) - 1)))
    plan = MergePlan(
        tuple(draw(st.permutations(NAMES))), tuple(pairwise([0, *sorted(cuts), len(NAMES)]))
    )
    steps = draw(st.lists(step, min_size=1, max_size=4))
    return Run(world_size, plan, draw(st.integers(0, 2)), tuple(steps))


def data_at(rank: int, step: int, micro: int) -> torch.Tensor:
    return data_of(rank + 1, step, micro)


def zero_grad(module: torch.nn.Module, how: str) -> None:
    if how != "keep":
        module.zero_grad(set_to_none=how == "to none")


def train(transport: LoopbackTransport, model: Layers, run: Run) -> list[Gradients]:
    model = copy.deepcopy(model)
    reducer = reducer_of(model, transport)
    seen = []
    for s, step in enumerate(run.steps):
        if s == run.install_before:
            reducer.install(run.plan)
        for m, micro in enumerate(step.micro_batches):
            with reducer.no_sync() if micro.no_sync else nullcontext():
                used = micro.used[transport.rank]
                backward(model, data_at(transport.rank, s, m), used)
        reducer.synchronize()
        seen.append(gradients(model))
        zero_grad(model, step.zero_grad)
    reducer.close()
    return seen


def expected(model: Layers, run: Run) -> list[Gradients]:
    """Before each exchange: what was there stays, and the mean of all that is new is added."""
    there: Gradients = dict.fromkeys(NAMES)
    seen = []
    for s, step in enumerate(run.steps):
        new = [
            plain(
                model,
                *((data_at(r, s, m), micro.used[r]) for m, micro in enumerate(step.micro_batches)),
            )
            for r in range(run.world_size)
        ]
        there = plus(there, mean(new))
        seen.append(there)
        if step.zero_grad == "to none":
            there = dict.fromkeys(NAMES)
        elif step.zero_grad == "to zero":
            there = {n: None if g is None else torch.zeros_like(g) for n, g in there.items()}
    return seen


@settings(max_examples=60, deadline=None)
@given(runs())
def test_gradients_are_the_mean_of_what_is_new(run: Run) -> None:
    """Any plan, any use of layers on each rank, several backwards, with no_sync and without."""
    model = Layers(LAYERS)
    oracle = expected(model, run)
    for seen in on_ranks(train, model, run, world_size=run.world_size):
        for ours, theirs in zip(seen, oracle, strict=True):
            assert_close(ours, theirs)
