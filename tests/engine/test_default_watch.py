"""A failure here: ranks drift apart unseen though nothing was asked for, or rounding ends them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_examples import Layers, backward, data_of
from loopback import on_ranks
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.optim import SGD

from lightning_mgwfbp import AlphaBeta, DDPCommHook, MergedOptimizer
from lightning_mgwfbp.engine.divergence import DEFAULT_CHECKS, DivergenceWatch
from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport

Named = list[tuple[str, nn.Parameter]]
ROTATION = DEFAULT_CHECKS.every_n_steps * DEFAULT_CHECKS.slices
NAN = float("nan")


def weights() -> Named:
    """55 numbers of several dtypes and layouts, none of which is a rounded 0."""
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.rand(5, 4, generator=generator) + 1,
        torch.rand(3, 2, 2, 2, generator=generator).to(memory_format=torch.channels_last) + 1,
        torch.rand(7, generator=generator).to(torch.bfloat16) + 1,
        torch.tensor(2.0, dtype=torch.float64),
        torch.empty(0, 3),
        torch.tensor([1 + 1j, 2 + 2j, 3 + 0j]),
    ]
    named = [(f"w{i}", nn.Parameter(each)) for i, each in enumerate(drawn)]
    named[2][1].requires_grad_(False)
    return named


def seen_at(watch: DivergenceWatch, exchanges: range) -> tuple[int, str] | None:
    """After how many exchanges an error was raised, and which."""
    for number in exchanges:
        watch.start(number)
        watch.finish()
        try:
            watch.compare(number)
        except RuntimeError as error:
            return number, str(error)
    return None


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_change_is_seen_within_a_rotation(world_size: int) -> None:
    """A number that is compared in no slice, or not on some rank."""

    def spoil_each(transport: LoopbackTransport) -> list[Any]:
        named = weights()
        watch = DivergenceWatch(named, transport)
        seen = [seen_at(watch, range(ROTATION))]
        total = sum(p.numel() for _, p in named)
        spoiled = 0
        for name, p in named:
            for place in range(p.numel()):
                index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), p.shape))
                before = p.detach().clone()
                if transport.rank == spoiled % world_size:
                    p.data[index] *= 2
                found = seen_at(watch, range(ROTATION, 2 * ROTATION))
                p.data.copy_(before)
                turn = spoiled * DEFAULT_CHECKS.slices // total
                assert found is not None
                assert abs(found[0] - ROTATION - 50 * turn) <= 50, "each in its own turn"
                where = f"'{name}'{list(index) if index else ''} is "
                seen.append(where in found[1] and "; 1 of 6 parameters differ" in found[1])
                spoiled += 1
        return seen

    assert on_ranks(spoil_each, world_size=world_size) == [[None] + 55 * [True]] * world_size


def test_a_change_of_all_is_seen_at_once() -> None:
    """Other weights altogether wait for a certain slice; the error says when it began."""

    def spoil(transport: LoopbackTransport) -> list[Any]:
        found = []
        for begin in (1, 351, 1951):
            named = weights()
            watch = DivergenceWatch(named, transport)
            assert seen_at(watch, range(begin)) is None
            for _, p in named:
                p.data += transport.rank
            found.append(seen_at(watch, range(begin, begin + 50)))
        return found

    first, second = on_ranks(spoil)
    assert first == second
    assert [number for number, _ in first] == [50, 400, 2000]
    assert all("; 5 of 6 parameters differ" in text for _, text in first)
    assert "slice of the weights, number 9 of 20, had not been compared before" in first[1][1]
    assert "slice of the weights, number 1 of 20, had last been compared 1000 steps" in first[2][1]
    assert "rounding explains 0.001" in first[2][1]


def after_change(transport: Transport, dtype: torch.dtype, mine: Any, theirs: Any) -> str:
    """What ends ranks of which one holds `theirs` among ones, the others `mine`."""
    values = torch.ones(100).to(dtype)
    values[50:52] = torch.tensor(theirs if transport.rank == 1 else mine).to(dtype)
    named = [("w", nn.Parameter(values, requires_grad=False))]
    watch = DivergenceWatch(named, transport)
    found = seen_at(watch, range(3 * ROTATION))
    return "" if found is None else found[1]


ROUNDED = {
    "float32": (torch.float32, 1.0, 1.0 + 2**-20),
    "below tolerance": (torch.float32, 1.0, 1.0 + 0.9e-3),
    "float64": (torch.float64, 1.0, 1.0 + 0.9e-3),
    "an ulp of bfloat16": (torch.bfloat16, 1.0, 1.0 + 2**-7),
    "five of float16": (torch.float16, 1.0, 1.0 + 5 * 2**-10),
    "an ulp of float8": (torch.float8_e4m3fn, 1.0, 1.125),
    "complex": (torch.complex64, 1.0, 1.0 + 0.9e-3j),
    "near a NaN on all ranks": (torch.float32, [NAN, 1.0], [NAN, 1.0001]),
    "near infinity on all ranks": (torch.float32, [float("inf"), 1.0], [float("inf"), 1.0001]),
    "a small number": (torch.float32, 1e-9, -1e-9),
}


@pytest.mark.parametrize(("dtype", "mine", "theirs"), ROUNDED.values(), ids=ROUNDED)
def test_last_bits_are_one_warning(dtype: torch.dtype, mine: Any, theirs: Any) -> None:
    """Rounding ends a training, is said again and again, or on every rank."""
    with pytest.warns(UserWarning, match="differ in their last bits after") as said:
        assert on_ranks(after_change, dtype, mine, theirs, world_size=3) == [""] * 3
    assert len(said) == 1
    assert "of the root mean square of 'w' at most" in str(said[0].message)


LARGE = {
    "float32": (torch.float32, 1.0, 1.01),
    "float64": (torch.float64, 1.0, 1.0011),
    "nine ulps of bfloat16": (torch.bfloat16, 1.0, 1.0 + 9 * 2**-7),
    "complex": (torch.complex64, 1.0, 1.0 + 0.01j),
    "infinity": (torch.float32, 1.0, float("inf")),
    "the other infinity": (torch.float32, float("-inf"), float("inf")),
    "NaN here": (torch.float32, NAN, 1.0),
    "NaN there": (torch.float32, 1.0, NAN),
    "integers": (torch.int64, 2**60, 2**60 + 1),
    "booleans": (torch.bool, True, False),
}


@pytest.mark.parametrize(("dtype", "mine", "theirs"), LARGE.values(), ids=LARGE)
def test_what_no_rounding_explains(dtype: torch.dtype, mine: Any, theirs: Any) -> None:
    """A large difference passes for rounding, or ends not all ranks alike."""
    texts = on_ranks(after_change, dtype, mine, theirs, world_size=3)
    assert len(set(texts)) == 1
    assert "'w'[50] is " in texts[0]
    assert " on ranks 0, 2 and " in texts[0]
    assert "; 1 of 1 parameters differ" in texts[0]
    assert "`detect_divergence_every_n_steps=1`" in texts[0]


def test_other_parameters_in_the_middle() -> None:
    """After parameters have joined or left the old ones are compared, or a message is lost."""

    def replace(transport: LoopbackTransport) -> Any:
        old = [("old", nn.Parameter(torch.ones(40)))]
        new = [("new", nn.Parameter(torch.ones(30)))]
        watch = DivergenceWatch(old, transport)
        assert seen_at(watch, range(20)) is None
        watch.start(50)
        watch.set_parameters(new)
        watch.finish()
        watch.compare(50)
        old[0][1].data += transport.rank
        assert seen_at(watch, range(51, 51 + ROTATION)) is None
        new[0][1].data += transport.rank
        return seen_at(watch, range(1100, 1101))

    for found in on_ranks(replace):
        assert "'new'[3] is 1.0 on rank 0 and 2.0 on rank 1" in found[1]


def train(transport: Transport, model: nn.Module, steps: int, **options: Any) -> None:
    merged = MergedOptimizer(
        SGD(model.parameters(), lr=0.0),
        model.named_parameters(),
        transport=transport,
        planner="single",
        link=AlphaBeta(1e-6, 1e-3),
        warmup_steps=1,
        **options,
    )
    try:
        for step in range(steps):
            merged.zero_grad()
            backward(model, data_of(transport.rank, step), (0,))
            if step == 45 and transport.rank == 1:
                model.layers[0].bias.data += 1e-2
                model.layers[0].weight.data += 1e-2
            merged.step()
    finally:
        merged.close()


@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
def test_it_is_on_by_default(schedule: str) -> None:
    """An optimizer that was told nothing of comparisons makes none."""
    models = [Layers(1), Layers(1)]
    with pytest.raises(RuntimeError, match=r"weights differ after .*'layers.0.weight'\[0, 1\] is "):
        on_ranks(lambda t: train(t, models[t.rank], 60, schedule=schedule, module=models[t.rank]))


def test_a_static_graph_is_still_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step waits for the device because weights are compared in some."""

    def noticed(_: Bucket) -> bool:
        raise AssertionError("the tail was read")

    monkeypatch.setattr(Bucket, "noticed", noticed)
    with pytest.raises(RuntimeError, match="weights differ after 50 steps"):
        on_ranks(lambda t: train(t, Layers(1), 60, static_graph=True))


def drift_by_hook(rank: int, every: int | None) -> str:
    transport = TorchTransport()
    hook = DDPCommHook(noop_hook)
    try:
        train(transport, Layers(1), 60, compressor=hook, detect_divergence_every_n_steps=every)
    except RuntimeError as error:
        return str(error)
    finally:
        transport.close()
    return ""


def test_a_hook_may_let_ranks_drift() -> None:
    """torch's noop_hook or local SGD end in an error, or a comparison that was asked for is not."""
    assert run_ranks(drift_by_hook, None) == ["", ""]
    for said in run_ranks(drift_by_hook, 10):
        assert "weights differ after 50 steps" in said


def test_one_number() -> None:
    """Models with fewer numbers than slices."""

    def tiny(transport: LoopbackTransport, spoils: bool) -> Any:
        value: Tensor = torch.tensor(1.0 + spoils * transport.rank)
        return seen_at(DivergenceWatch([("w", nn.Parameter(value))], transport), range(51))

    assert on_ranks(tiny, False) == [None, None]
    assert [found[0] for found in on_ranks(tiny, True)] == [0, 0]
