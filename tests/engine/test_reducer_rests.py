"""A failure here is a gradient that is neither sent nor kept, or both: training drifts unseen."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_examples import lasting
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import on_ranks
from rest_examples import (
    EXACT_BELOW,
    NAMES,
    SHAPES,
    Backward,
    Others,
    Step,
    Training,
    assert_same,
    plan_of_sizes,
    random_step,
)
from torch import nn

from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.compressed import CompressedExchanger
from lightning_mgwfbp.exchange.compressors import Compressor, Quantize8, RandomK, TopK

COMPRESSORS = {
    "topk": TopK(density=0.2, dense_below_numel=EXACT_BELOW),
    "randomk": RandomK(density=0.2, dense_below_numel=EXACT_BELOW),
    "int8": Quantize8(block_numel=32, dense_below_numel=EXACT_BELOW),
    "whole, then topk": TopK(
        0.2, density_schedule=[0.1, 1.0, 0.05, 1.0], schedule_unit="step", dense_below_numel=0
    ),
}
each = pytest.mark.parametrize("compressor", COMPRESSORS.values(), ids=COMPRESSORS)


def random_steps(seed: int, count: int, world_size: int) -> list[Step]:
    choose = random.Random(seed).choice
    return [random_step(choose, world_size) for _ in range(count)]


def assert_one_rank_conserves(
    compressor: Compressor, steps: list[Step], world_size: int = 2
) -> None:
    """given == sent + left, where others send zeros, so that sent == world_size * received."""
    training = Training(Others(world_size), compressor).run(steps)
    left = training.left
    assert_same(
        training.given, {n: world_size * r + left.get(n, 0) for n, r in training.received.items()}
    )


@each
@pytest.mark.parametrize("world_size", [2, 4])
def test_fifty_steps_of_one_rank(compressor: Compressor, world_size: int) -> None:
    """A long training with everything that can happen to a gradient in it."""
    assert_one_rank_conserves(compressor, random_steps(world_size, 50, 1), world_size)


@st.composite
def runs(draw: st.DrawFn) -> list[Step]:
    def choose(values: Sequence[Any]) -> Any:
        return draw(st.sampled_from(values))

    return [random_step(choose, 1) for _ in range(draw(st.integers(1, 4)))]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(list(COMPRESSORS)), runs())
def test_any_steps_of_one_rank(compressor: str, steps: list[Step]) -> None:
    """The same, and the shortest training that fails."""
    assert_one_rank_conserves(COMPRESSORS[compressor], steps)


@each
def test_fifty_steps_of_all_ranks(compressor: Compressor) -> None:
    """Each rank conserves, but the average is of other numbers than were sent."""
    steps = random_steps(7, 50, world_size=2)
    ranks = on_ranks(lambda transport: Training(transport, compressor).run(steps))
    for n in NAMES:
        left = sum(t.left.get(n, torch.zeros(())) for t in ranks)
        assert torch.equal(ranks[0].received[n], ranks[1].received[n]), n
        assert torch.equal(sum(t.given[n] for t in ranks), 2 * ranks[0].received[n] + left), n


@each
def test_the_number_of_ranks_changes(compressor: Compressor) -> None:
    """The mean of what was given is no longer the sum of the averages and the mean rest."""
    given = {n: torch.zeros(SHAPES[n], dtype=torch.float64) for n in NAMES}
    states = None
    for world_size in (2, 3, 1):
        steps = random_steps(world_size, 10, world_size)
        ranks = on_ranks(
            lambda transport, steps=steps, states=states: Training(
                transport, compressor, states
            ).run(steps),
            world_size=world_size,
        )
        states = [t.exchanger.state_dict() for t in ranks]
        for n in NAMES:
            given[n] += sum(t.given[n] for t in ranks) / world_size - ranks[0].received[n]
            left = sum(t.left.get(n, torch.zeros(())) for t in ranks) / world_size
            torch.testing.assert_close(given[n], left + torch.zeros_like(given[n]))


@each
def test_every_dtype(compressor: Compressor) -> None:
    """Complex numbers are no pairs, narrow ones are rounded, or dtypes of a group are mixed up."""
    compressor = replace(compressor, dense_below_numel=10)
    dtypes = {
        "double": torch.float64,
        "complex": torch.complex64,
        "narrow": torch.bfloat16,
        "small": torch.bfloat16,
        "half": torch.float16,
        "single": torch.float32,
        "wide complex": torch.complex128,
    }
    shapes = {n: (3,) if n == "small" else (40, 3) for n in dtypes}
    model = {n: nn.Parameter(torch.zeros(shapes[n], dtype=d)) for n, d in dtypes.items()}
    exchanger = CompressedExchanger(Others(), compressor)
    reducer = Reducer(lasting(model.items()), exchanger)
    reducer.install(plan_of_sizes(7, names=tuple(dtypes)))
    given, sent = dict.fromkeys(dtypes, 0), dict.fromkeys(dtypes, 0)
    for s in range(6):
        generator = torch.Generator().manual_seed(s)
        for n, p in model.items():
            # no larger than what the sums of six and their halves can be in bfloat16
            gradient = torch.randint(-9, 9, (2, *p.shape), generator=generator).to(p.dtype)
            gradient = gradient[0] + 1j * gradient[1] if p.is_complex() else gradient[0]
            given[n] = given[n] + gradient
            (p * gradient.conj()).sum().real.backward()
        reducer.synchronize()
        reducer.stepped()
        for n, p in model.items():
            assert p.grad.dtype == p.dtype
            sent[n] = sent[n] + 2 * p.grad.to(torch.promote_types(p.dtype, torch.float32))
            p.grad = None
    left = exchanger.state_dict()["residual"]
    for n in dtypes:
        assert torch.equal(sent[n] + left[n], given[n].to(left[n].dtype)), n
    assert left["small"].dtype == left["narrow"].dtype == left["half"].dtype == torch.float32


TWICE = Backward((NAMES,)), Backward((NAMES[1::2],))
FIXED = {
    "regrouped": [Step(TWICE[:1], before=str(i % 4)) for i in range(8)],
    "resumed": [Step(TWICE[:1], before="resume" if i % 2 else "1") for i in range(6)],
    "unused": [Step((Backward((NAMES[i % 6 :],)),)) for i in range(7)],
    "kept": [Step(TWICE[i % 2 : i % 2 + 1], zero_grad="keep") for i in range(6)],
    "kept, then zeroed": [Step(TWICE[:1], zero_grad=z) for z in ("keep", "to zero", "keep")],
    "no_sync": [Step((Backward((NAMES,), no_sync=True), TWICE[i % 2])) for i in range(5)],
    "late": [Step(TWICE[:1]), *[Step(TWICE, zero_grad="keep")] * 4],
    "late under no_sync": [Step(TWICE[:1])] * 2
    + [Step((TWICE[0], Backward((NAMES,), no_sync=True)), zero_grad="keep")] * 3,
    "frozen": [Step(TWICE[:1], frozen=n, zero_grad="keep") for n in (*NAMES, "", *NAMES)],
    "poisoned": [Step(TWICE[:1], poisoned=-(i % 2)) for i in range(6)],
    "poisoned late": [Step(TWICE, poisoned=-(i % 2)) for i in range(6)],
}


@each
@pytest.mark.parametrize("steps", FIXED.values(), ids=FIXED)
def test_one_thing_after_the_other(compressor: Compressor, steps: list[Step]) -> None:
    """The one of the things above by which gradients are lost."""
    assert_one_rank_conserves(compressor, steps)


@each
def test_something_is_left(compressor: Compressor) -> None:
    """All tests here hold because nothing is compressed."""
    training = Training(Others(), compressor).run([Step(TWICE[:1])])
    assert training.left["large"].any()
    assert not any(r.any() for n, r in training.left.items() if n in ("scalar", "small")) or (
        compressor.dense_below_numel == 0
    )
    assert all(training.left[n].dtype == torch.float64 for n in training.left)
