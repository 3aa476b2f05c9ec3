"""A failure here is a bit that differs from DistributedDataParallel's, on two real processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from fuzz_examples import (
    OPTIMIZERS,
    TOP_ALL,
    Case,
    Fuzzed,
    MicroBatch,
    Seen,
    Spec,
    Step,
    Trainee,
    assert_seen_alike,
    fits,
    names_of,
    plans,
    specs,
    train_merged,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow

WIDE = ("float32", "float32", "float64")


class Wrapped(DistributedDataParallel):
    """With what the training loop asks of a wrapper beside what this one has."""

    def synchronize(self) -> None:
        return

    def flush(self) -> None:
        return


def narrow(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations as strings
    """What DDP knows by its name, and allows on GPUs only."""
    return bf16_compress_hook(state, bucket)


def train(rank: int, case: Case) -> tuple[Seen, Seen]:
    """What this rank sees with MergedOptimizer, and with DistributedDataParallel."""
    model = Fuzzed(case, bends=True)
    model.freeze(case.steps[0].frozen)
    wrapped = Wrapped(model, find_unused_parameters=True)
    if case.compressor == "bf16":
        wrapped.register_comm_hook(None, narrow)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    theirs = Trainee(case, model, optimizer, wrapped).run(rank)
    return train_merged(case, rank, None, bends=True), theirs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """What DDP can do; what was frozen when it began it never exchanges."""
    compressor = draw(st.sampled_from((None, None, None, "bf16", TOP_ALL)))
    # DDP's hook narrows what is narrow already, and is given no sparse gradients
    kind = specs(*WIDE) if compressor == "bf16" else specs(*WIDE, "bfloat16", "float16")
    kinds = draw(st.lists(kind, min_size=1, max_size=6))
    if compressor == "bf16":
        kinds = [replace(kind, is_sparse=False) for kind in kinds]
    compressor = compressor if fits(compressor, kinds) else None
    schedules = ("backward",) if compressor == TOP_ALL else ("backward", "cross_iteration")
    schedule = draw(st.sampled_from(schedules))
    count, is_rowwise = len(kinds), any(kind.is_sparse for kind in kinds)
    frozen = draw(st.frozensets(st.integers(0, count - 1), max_size=count - 1))
    trainable = [i for i in range(count) if i not in frozen]
    # averages come back to be averaged only where nothing is rounded on the way
    is_plain = schedule != "backward" or compressor is not None
    drawn = steps_of(count, frozen, is_plain=is_plain, clips=not is_rowwise)
    steps = draw(st.lists(drawn, min_size=1, max_size=5))
    steps[0] = replace(steps[0], frozen=frozen)
    is_static = not is_rowwise and draw(st.integers(0, 5)) == 0
    if is_static:
        used = tuple(draw(st.permutations(trainable)))
        micro = MicroBatch((used, used), no_sync=False, synchronizes=True)
        steps = [replace(step, frozen=frozen, micro_batches=(micro,)) for step in steps]
    plan = draw(plans(names_of(kinds, trainable), compressor))
    return Case(
        world_size=2,
        specs=tuple(kinds),
        optimizer="sgd" if is_rowwise else draw(st.sampled_from(tuple(OPTIMIZERS))),
        steps=tuple(as_ddp_can(step, schedule, kinds, trainable) for step in steps),
        plan=plan,
        compressor=compressor,
        schedule=schedule,
        static_graph=is_static,
        replan_every_n_steps=draw(st.sampled_from((None, 1, 2))) if isinstance(plan, str) else None,
    )


@st.composite
def steps_of(
    draw: st.DrawFn, count: int, frozen: frozenset[int], *, is_plain: bool, clips: bool
) -> Step:
    """Plain ones have one exchange each, and forget its gradients."""
    used = st.lists(st.integers(0, count - 1), max_size=count + 1).map(tuple)
    no_sync = st.just(True) if is_plain else st.booleans()
    micro_batch = st.builds(MicroBatch, st.tuples(used, used), no_sync, st.just(True))
    # a deferred step waits for a forward
    micro_batches = draw(st.lists(micro_batch, min_size=int(is_plain), max_size=3))
    if micro_batches:
        micro_batches[-1] = replace(micro_batches[-1], no_sync=False)
    return Step(
        tuple(micro_batches),
        "to none" if is_plain else draw(st.sampled_from(("to none", "to zero", "keep"))),
        frozen | draw(st.frozensets(st.integers(0, count - 1), max_size=count - 1)),
        clips=clips and draw(st.integers(0, 3)) == 0,
        is_taken=draw(st.integers(0, 4)) > 0,
        is_looked_at=draw(st.booleans()),
    )


def as_ddp_can(step: Step, schedule: str, kinds: Sequence[Spec], trainable: list[int]) -> Step:
    """Averaged after each backward, as DDP does, but for deferred steps.

    DDP waits for ever for a rank whose loss needs no parameter, and wants sparse gradients of all
    that has them.
    """
    always = [i for i in trainable if kinds[i].is_sparse]
    frozen = step.frozen - set(always)
    if not set(trainable) - frozen:
        frozen = frozen - set(trainable)
    always = always or [min(set(trainable) - frozen)]

    def possible(micro: MicroBatch) -> MicroBatch:
        synchronizes = schedule == "backward" and not micro.no_sync
        used = tuple((*always, *theirs) for theirs in micro.used)
        return replace(micro, used=used, synchronizes=synchronizes)

    return replace(step, frozen=frozen, micro_batches=tuple(map(possible, step.micro_batches)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(cases())
def test_what_a_rank_sees_is_what_ddp_shows(case: Case) -> None:
    """Losses, weights or gradients."""
    for ours, theirs in run_ranks(train, case):
        assert_seen_alike(ours, theirs)
