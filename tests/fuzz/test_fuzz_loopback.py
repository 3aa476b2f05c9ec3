"""A failure here is a training whose averages are not the means of what was accumulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fuzz_examples import (
    OPTIMIZERS,
    TOP_ALL,
    Case,
    Fuzzed,
    MicroBatch,
    Seen,
    Step,
    assert_seen_alike,
    fits,
    names_of,
    plans,
    specs,
    strided,
    train_merged,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import on_ranks
from torch import Tensor, nn

from lightning_mgwfbp.exchange.transport import LoopbackTransport

pytestmark = pytest.mark.slow

DTYPES = ("float32", "float32", "float64", "bfloat16", "float16", "complex64")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that ranks may do between exchanges, frozen parameters that are unfrozen too."""
    world_size = draw(st.integers(2, 5))
    kinds = tuple(draw(st.lists(specs(*DTYPES), min_size=1, max_size=6)))
    schedule = draw(st.sampled_from(("backward", "backward", "cross_iteration")))
    trainable = draw(st.sets(st.integers(0, len(kinds) - 1), min_size=1))
    frozen = frozenset(range(len(kinds))) - trainable
    drawn = steps_of(len(kinds), world_size, is_deferred=schedule != "backward")
    steps = draw(st.lists(drawn, min_size=1, max_size=6))
    steps[0] = replace(steps[0], frozen=frozen)
    is_rowwise = any(kind.is_sparse for kind in kinds)
    if is_rowwise:  # which neither norms nor most optimizers understand
        steps = [replace(step, clips=False) for step in steps]
    for n in range(1, len(steps)):  # clipped averages are not whole, to be averaged again
        if steps[n - 1].clips and steps[n].zero_grad == "keep":
            steps[n] = replace(steps[n], zero_grad="to zero")
    is_even = draw(st.booleans())
    steps = [even(step, min(trainable)) if is_even else straight(step) for step in steps]
    is_static = not is_rowwise and draw(st.integers(0, 5)) == 0
    if is_static:
        used = tuple(draw(st.permutations(sorted(trainable))))
        micro = MicroBatch((used,) * world_size, no_sync=False, synchronizes=False)
        steps = [replace(step, frozen=frozen, micro_batches=(micro,)) for step in steps]
    methods = (None, None, TOP_ALL) if schedule == "backward" else (None,)
    compressor = draw(st.sampled_from(methods))
    compressor = compressor if fits(compressor, kinds) else None
    plan = draw(plans(names_of(kinds, sorted(trainable)), compressor))
    return Case(
        world_size,
        kinds,
        optimizer="sgd" if is_rowwise else draw(st.sampled_from(tuple(OPTIMIZERS))),
        steps=tuple(steps),
        plan=plan,
        compressor=compressor,
        schedule=schedule,
        static_graph=is_static,
        replan_every_n_steps=draw(st.sampled_from((None, 1, 2))) if isinstance(plan, str) else None,
    )


@st.composite
def steps_of(draw: st.DrawFn, count: int, world_size: int, *, is_deferred: bool) -> Step:
    """Deferred ones have a forward, no exchange before they are made, and lose their gradients."""
    used = st.lists(st.integers(0, count - 1), max_size=count + 1).map(tuple)
    micro_batch = st.builds(
        MicroBatch,
        st.tuples(*[used] * world_size),
        no_sync=st.booleans(),
        synchronizes=st.just(False) if is_deferred else st.booleans(),
    )
    zero_grads = ("to none",) if is_deferred else ("to none", "to zero", "keep")
    return Step(
        tuple(draw(st.lists(micro_batch, min_size=int(is_deferred), max_size=3))),
        draw(st.sampled_from(zero_grads)),
        draw(st.frozensets(st.integers(0, count - 1), max_size=count - 1)),
        clips=draw(st.integers(0, 3)) == 0,
        is_taken=draw(st.integers(0, 4)) > 0,
        is_looked_at=draw(st.booleans()),
    )


def straight(step: Step) -> Step:
    """With one exchange, to which all ranks come, whatever they have."""
    micro_batches = tuple(replace(micro, synchronizes=False) for micro in step.micro_batches)
    return replace(step, is_taken=True, micro_batches=micro_batches)


def even(step: Step, some: int) -> Step:
    """With gradients on all ranks after each backward: each must know that an exchange is due
    where gradients are thrown away, or come after synchronize()."""
    frozen = step.frozen - {some}
    micro_batches = tuple(
        replace(micro, used=tuple((*used, some) for used in micro.used))
        for micro in step.micro_batches
    )
    return replace(step, frozen=frozen, micro_batches=micro_batches)


class Oracle:
    """All ranks at once: at each exchange the mean of all that is new is added to what is there."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Fuzzed(case, bends=False)
        self.parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[case.optimizer](self.parameters)
        self.there: list[Tensor | None] = [None] * len(self.parameters)
        self.new: list[dict[int, Tensor]] = [{} for _ in range(case.world_size)]
        self.seen: list[Seen] = [[] for _ in range(case.world_size)]

    def run(self) -> list[Seen]:
        for number, step in enumerate(self.case.steps):
            self.model.freeze(step.frozen)
            if step.zero_grad != "keep":
                self.exchange()
                to_none = step.zero_grad == "to none"
                self.there = [None if g is None or to_none else 0 * g for g in self.there]
            for m, micro in enumerate(step.micro_batches):
                for rank, used in enumerate(micro.used):
                    self.backward(rank, used, number, m)
                if micro.synchronizes:
                    self.exchange()
            self.end(step)
        self.look()
        return self.seen

    def backward(self, rank: int, used: tuple[int, ...], step: int, micro: int) -> None:
        self.model.zero_grad()
        loss = self.model(used, rank, step, micro)
        self.seen[rank].append(loss.detach())
        if loss.requires_grad:
            loss.backward()
        for i, p in enumerate(self.parameters):
            if p.grad is not None:
                self.new[rank][i] = self.new[rank][i] + p.grad if i in self.new[rank] else p.grad

    def exchange(self) -> None:
        for i, before in enumerate(self.there):
            parts = [mine.pop(i) / self.case.world_size for mine in self.new if i in mine]
            if parts:
                average = sum(parts[1:], parts[0])
                self.there[i] = average if before is None else before + average

    def end(self, step: Step) -> None:
        if step.clips or step.is_taken:
            self.exchange()
        for p, g in zip(self.parameters, self.there, strict=True):
            p.grad = None if g is None else g.clone()
        if step.clips:
            nn.utils.clip_grad_norm_(self.parameters, 1.0)
            self.there = [p.grad for p in self.parameters]
        if step.is_taken:
            self.optimizer.step()
        if step.is_looked_at:
            self.look()
            if step.is_taken and self.case.schedule == "backward":
                for mine in self.seen:
                    mine += [None if g is None else strided(g) for g in self.there]

    def look(self) -> None:
        for mine in self.seen:
            mine += [p.detach().clone() for p in self.parameters]


def train(transport: LoopbackTransport, case: Case) -> Seen:
    return train_merged(case, transport.rank, transport, bends=False)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(cases())
def test_averages_are_the_means_of_what_is_new(case: Case) -> None:
    """Losses, weights or gradients differ on some rank."""
    oracle = Oracle(case).run()
    for ours, theirs in zip(
        on_ranks(train, case, world_size=case.world_size, timeout_seconds=2.0), oracle, strict=True
    ):
        assert_seen_alike(ours, theirs)
