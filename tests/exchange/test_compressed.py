"""A failure here is an exchange that sends or averages other numbers than the method says."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from exchange_examples import (
    COMPRESSORS,
    EXACT_BELOW,
    NAMES,
    SPLIT,
    Run,
    compressed_run,
    each,
)
from loopback import on_ranks, recorded, same_bits
from ranks import run_ranks

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.compressed import CompressedExchanger
from lightning_mgwfbp.exchange.compressors import COMPRESSORS as BY_NAME
from lightning_mgwfbp.exchange.compressors import Compressor, Quantize8, RandomK, TopK, as_written
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchanger
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport


def trained(transport: Transport, compressor: Compressor | None, steps: int, **options: Any) -> Any:
    exchanger: Exchanger = (
        DenseExchanger(transport)
        if compressor is None
        else CompressedExchanger(transport, compressor)
    )
    run = Run(exchanger, SPLIT)
    return [run.step(s, **options) for s in range(steps)]


def trained_on_gloo(rank: int, compressor: Compressor | None, steps: int) -> Any:
    return trained(TorchTransport.world(), compressor, steps)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("chosen", [TopK(1.0), RandomK(1.0), COMPRESSORS["topk"]], ids=repr)
def test_whole_is_dense(chosen: Compressor, world_size: int) -> None:
    """What travels whole, by density or by the plan, differs from dense in a bit."""
    density = 1.0 if chosen is COMPRESSORS["topk"] else None
    ours = on_ranks(lambda t: trained(t, chosen, 4, density=density), world_size=world_size)
    for got, dense in zip(ours, on_ranks(trained, None, 4, world_size=world_size), strict=True):
        for averages, others in zip(got, dense, strict=True):
            assert all(same_bits(averages[n], others[n]) for n in NAMES)


@each
def test_on_gloo_as_on_threads(compressor: Compressor) -> None:
    """A real transport takes other layouts of messages, or its results are read too early."""
    for compressor_or_whole in (compressor, TopK(1.0)):
        real = run_ranks(trained_on_gloo, compressor_or_whole, 3)
        threads = on_ranks(trained, compressor_or_whole, 3)
        for ours, theirs in zip(real, threads, strict=True):
            for averages, others in zip(ours, theirs, strict=True):
                assert all(same_bits(averages[n], others[n]) for n in NAMES)


@pytest.mark.parametrize(
    ("world_size", "density", "collective"),
    [
        (2, 0.49, "all_gather"),
        (2, 0.5, "all_reduce"),
        (4, 0.24, "all_gather"),
        (4, 0.25, "all_reduce"),
        (4, 0.9, "all_reduce"),
    ],
)
def test_what_saves_nothing_travels_whole(world_size: int, density: float, collective: str) -> None:
    """More bytes are sent than a dense exchange would, or a compressed one is never made."""

    def collectives(transport: LoopbackTransport) -> list[str]:
        messages = recorded(transport)
        run = compressed_run(transport, TopK(density, dense_below_numel=EXACT_BELOW), SPLIT[:1])
        run.step(0)
        return [collective for collective, _, _ in messages]

    saves_nothing = collective == "all_reduce"
    with pytest.warns(UserWarning, match="no effect") if saves_nothing else nullcontext():
        assert on_ranks(collectives, world_size=world_size) == [[collective]] * world_size


@pytest.mark.parametrize(
    ("compressor", "world_size", "has_no_effect"),
    [
        (TopK(0.49), 2, False),
        (TopK(0.5), 2, True),
        (TopK(0.25), 3, False),
        (TopK(0.25), 4, True),
        (TopK(1.0), 2, False),  # everything was asked for
        (RandomK(1.0), 2, False),
        (RandomK(0.99), 8, False),  # is summed on the way
        (TopK(0.01, density_schedule=[1.0]), 2, False),  # later
        (Quantize8(), 4, False),
        (Quantize8(), 8, True),
        (BY_NAME["int8"], 8, True),
    ],
    ids=repr,
)
def test_what_never_compresses_is_said_once(
    compressor: Compressor, world_size: int, has_no_effect: bool
) -> None:
    """A dense training is taken for a compressed one; or every rank says so, or without need."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        on_ranks(CompressedExchanger, compressor, world_size=world_size)
    said = f"`compressor={as_written(compressor)}` has no effect on {world_size} ranks: "
    assert [str(w.message).startswith(said) for w in warned] == [True] * has_no_effect


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_one_message_per_bucket(compressor: Compressor, dtype: torch.dtype) -> None:
    """Values, positions and the tail travel one by one, or more is sent than is planned by."""

    def messages_of(transport: LoopbackTransport) -> list[tuple[str, str, int]]:
        messages = recorded(transport)
        run = compressed_run(transport, compressor, SPLIT, dtype)
        for s in range(3):
            run.step(s)
        return messages

    itemsize = max(dtype.itemsize, 4)
    numels, exact, tails = (1000, 108), (0, 8), (4, 7)
    nbytes = [
        float(compressor.wire_nbytes(n, itemsize, compressor.settled_density)) + (e + t) * itemsize
        for n, e, t in zip(numels, exact, tails, strict=True)
    ]
    ours, theirs = on_ranks(messages_of)
    assert ours == theirs
    assert len(ours) == 3 * 2
    for number, (collective, key, sent) in enumerate(ours):
        assert collective == compressor.collective
        assert key == f"bucket {number % 2}"
        assert nbytes[number % 2] <= sent < nbytes[number % 2] + 3 * 8


@each
def test_small_parameters_are_exact(compressor: Compressor) -> None:
    """A bias is compressed, or leaves a rest, because it shares a bucket."""

    def train(transport: LoopbackTransport) -> Any:
        run = compressed_run(transport, compressor)
        averages = [run.step(s) for s in range(3)]
        return averages, run.state["residual"]

    for (ours, left), dense in zip(on_ranks(train), on_ranks(trained, None, 3), strict=True):
        for averages, others in zip(ours, dense, strict=True):
            assert all(same_bits(averages[n], others[n]) for n in ("bias", "scalar", "empty"))
            assert not torch.equal(averages["large"], others["large"])
        assert not left["bias"].any()
        assert not left["scalar"].any()
        assert left["large"].any()
        assert left["filters"].any()


def test_the_loss_scale_is_asked_once_a_step() -> None:
    """On a GPU each bucket waits for the device."""
    run = compressed_run(LoopbackTransport.solo(), COMPRESSORS["topk"], SPLIT)
    asked = []
    run.exchanger.gradient_scale = lambda: asked.append(1) or 1.0  # type: ignore[func-returns-value]
    for s in range(3):
        run.step(s)
    assert len(asked) == 3


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("density", [None, 1.0], ids=["sparse", "whole"])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_local_clipping(limit: float, density: float | None, scale: float) -> None:
    """A limit of its own for each bucket, one in units of the loss scale, or one that enlarges."""
    compressor = TopK(0.1, local_clip_norm=limit, dense_below_numel=EXACT_BELOW)

    def clip(transport: LoopbackTransport) -> Any:
        run = compressed_run(transport, compressor, SPLIT)
        run.exchanger.gradient_scale = lambda: scale
        averages = run.step(0, density=density, scale=scale)
        return run.gradients(0), averages, run.state.get("residual", {})

    ranks = on_ranks(clip)
    clipped = []
    for gradients, _, _ in ranks:
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        factor = min(1.0, limit * math.sqrt(1 / 2) / norm)
        clipped.append({n: factor * g for n, g in gradients.items()})
    for n in NAMES:
        given = sum(rank[n] for rank in clipped)
        left = sum(rests.get(n, torch.zeros(())) for _, _, rests in ranks)
        torch.testing.assert_close(2 * ranks[0][1][n] / scale + left, given)
    assert bool(ranks[0][2]) == (density is None)


@pytest.mark.parametrize("unit", ["epoch", "step"])
def test_schedules_reach_the_messages(unit: Any) -> None:
    """A density schedule is looked up and then not used."""
    schedule = [0.2, 1.0, 0.05]
    compressor = TopK(
        0.01, density_schedule=schedule, schedule_unit=unit, dense_below_numel=EXACT_BELOW
    )

    def sizes(transport: LoopbackTransport) -> list[int]:
        messages = recorded(transport)
        run = compressed_run(transport, compressor, SPLIT[:1])
        for s in range(5):
            if unit == "epoch":
                run.exchanger.epoch = s
                run.step(2 * s)
            run.step(2 * s + 1)
            if s == 1:
                assert run.state["residual"] == {}  # the whole phase has flushed
        return [nbytes for _, _, nbytes in messages]

    tail = 4 * 4
    per_step = [200 * 8 + tail, 1000 * 4 + tail, *(n * 8 + tail for n in (50, 10, 10))]
    repeats = 2 if unit == "epoch" else 1
    assert on_ranks(sizes) == [[n for n in per_step for _ in range(repeats)]] * 2


def test_rank_0_says_what_a_function_says() -> None:
    """Ranks send messages of different sizes, which end a process or mix up weights."""

    def send(transport: LoopbackTransport) -> list[int]:
        def answer(step: int) -> float:
            assert transport.rank == 0, "only one rank can be right"
            return 0.1 + 0.1 * step

        top_k = TopK(density=0.3, density_schedule=answer, schedule_unit="step")
        exchanger = CompressedExchanger(transport, replace(top_k, dense_below_numel=0))
        bucket = Bucket([torch.zeros(100)], ["weight"], 1)
        exchanger.adopt([bucket])
        counts = []
        for _ in range(3):
            bucket.pack([torch.arange(1.0, 101.0)], [True])
            exchanger.start(bucket, key="bucket").finish()
            counts.append(int((bucket.data != 0).sum()))
            exchanger.conclude()
        return counts

    assert on_ranks(send) == [[10, 20, 30]] * 2
