"""A failure here is a rank whose weights differ unnoticed, or an alarm where none do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_examples import Layers, backward, data_of
from horovod_ranks import on_horovod_ranks
from loopback import on_ranks, record_keys, recorded
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam

from lightning_mgwfbp import AlphaBeta, MergedOptimizer, PowerSGD, Quantize8, RandomK, TopK
from lightning_mgwfbp.engine.cross_iteration import CrossIteration
from lightning_mgwfbp.engine.divergence import Checks, DivergenceWatch
from lightning_mgwfbp.engine.weight_differences import _ranks
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64)
Spoil = Callable[[list[Tensor]], None]


def weights() -> list[tuple[str, nn.Parameter]]:
    """Of every dtype and layout, one of them frozen."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(3, 4, generator=generator).to(dtype) for dtype in DTYPES]
    drawn += [torch.tensor(2.0), torch.empty(0), torch.randn(2, 3, generator=generator).mT]
    image = torch.randn(2, 3, 4, 4, generator=generator)
    drawn += [image.to(memory_format=torch.channels_last), torch.tensor([float("nan"), -0.0])]
    named = [(f"w{i}", nn.Parameter(each)) for i, each in enumerate(drawn)]
    named[2][1].requires_grad_(False)
    return named


def said(transport: Transport, rank: int, spoil: Spoil, world_size: int = 2) -> str:
    """What is said where `rank` has spoiled its weights; empty: nothing."""
    named = weights()
    if transport.rank == rank:
        spoil([p.data for _, p in named])
    return compared(named, transport)


def compared(named: list[tuple[str, nn.Parameter]], transport: Transport) -> str:
    """What is said of weights that must be equal bit for bit."""
    watch = DivergenceWatch(named, transport, Checks(1))
    watch.start(0)
    watch.finish()
    try:
        watch.compare(0)
    except RuntimeError as error:
        return str(error)
    return ""


def one_ulp(values: list[Tensor]) -> None:
    values[1][2, 3] = torch.nextafter(values[1][2, 3], torch.tensor(9.0, dtype=torch.float64))


def two_elements(values: list[Tensor]) -> None:
    values[0].view(-1)[[0, 5]] = values[0].view(-1)[[5, 0]]


def two_rows(values: list[Tensor]) -> None:
    values[3][[0, 2]] = values[3][[2, 0]]


def sign_of_zero(values: list[Tensor]) -> None:
    values[9][1] = 0.0


def frozen_one(values: list[Tensor]) -> None:
    values[2] *= 2


def imaginary_part(values: list[Tensor]) -> None:
    torch.view_as_real(values[4])[0, 0, 1] += 1


def scalar(values: list[Tensor]) -> None:
    values[5] += 1


def last_channel(values: list[Tensor]) -> None:
    values[8][1, 2, 3, 3] += 1


# what is said to differ, what it is on all ranks but one, and there
SPOILED: dict[str, tuple[Spoil, str, str, str]] = {
    "one ulp": (one_ulp, "'w1'[2, 3]", "-1.277006983757019", "-1.2770069837570188"),
    "two elements": (two_elements, "'w0'[0, 0]", "0.6613521575927734", "-0.16613022983074188"),
    "two rows": (two_rows, "'w3'[0, 0]", "0.8310546875", "-0.68408203125"),
    "sign of zero": (sign_of_zero, "'w9'[1]", "-0.0", "0.0"),
    "frozen": (frozen_one, "'w2'[0, 0]", "0.326171875", "0.65234375"),
    "complex": (
        imaginary_part,
        "'w4'[0, 0]",
        "(-0.5525082945823669+0j)",
        "(-0.5525082945823669+1j)",
    ),
    "scalar": (scalar, "'w5'", "2.0", "3.0"),
    "channels_last": (
        last_channel,
        "'w8'[1, 2, 3, 3]",
        "-1.7962429523468018",
        "-0.7962429523468018",
    ),
}


@pytest.mark.parametrize(("spoil", "name", "usual", "spoiled"), SPOILED.values(), ids=SPOILED)
def test_a_spoiled_weight_is_named_on_every_rank(
    spoil: Spoil, name: str, usual: str, spoiled: str
) -> None:
    """A difference of bits goes unseen, another rank or element is named, or not on all ranks."""
    for rank in range(3):
        texts = on_ranks(said, rank, spoil, world_size=3)
        assert len(set(texts)) == 1
        (text,) = set(texts)
        others = ("ranks 1-2", "ranks 0, 2", "ranks 0-1")[rank]
        both = [f"{usual} on {others}", f"{spoiled} on rank {rank}"]
        both = both[::-1] if rank == 0 else both
        assert f": {name} is {' and '.join(both)}; 1 of 10 parameters" in text


def test_no_false_alarm() -> None:
    """Equal bits of some dtype or layout count as different: NaN, -0.0, nothing at all."""
    assert on_ranks(said, -1, one_ulp, world_size=3) == [""] * 3


def test_every_rank_on_its_own() -> None:
    """Many different values fill the screen, or a rank's own text differs from the others'."""

    def differ(transport: LoopbackTransport) -> str:
        named = [("w", nn.Parameter(torch.tensor(float(transport.rank))))]
        return compared(named, transport)

    texts = on_ranks(differ, world_size=6)
    assert len(set(texts)) == 1
    assert "'w' is 0.0 on rank 0 and 1.0 on rank 1 and 2.0 on rank 2 and " in texts[0]
    assert " and 3.0 on rank 3 and 2 more elsewhere; 1 of 1 parameters" in texts[0]
    assert _ranks([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


def test_when_it_is_due() -> None:
    """Weights are compared before all buckets are on their way, too seldom, or by one rank."""

    def keys(transport: LoopbackTransport) -> list[str]:
        sent = record_keys(transport)
        model = Layers()
        merged = merged_of(model, transport, detect_divergence_every_n_steps=2)
        for step in range(5):
            backward(model, data_of(step))
            merged.step()
        merged.close()
        return [key for key in sent if key.startswith(("bucket", "weights"))]

    for sent in on_ranks(keys):
        exchanges = " ".join(sent).replace("bucket 0", "\n").split("\n")[1:]
        assert [each.endswith(" weights ") for each in exchanges[:-1]] == [True, False] * 2
        assert sent[-1] == "weights"
        assert sent.count("weights") == 3
    assert "weights" not in on_ranks(keys, world_size=1)[0]


def test_little_travels_while_all_is_well() -> None:
    """Parameters, a number for each of them, or anything that blocks, travels each time."""

    def sizes(transport: LoopbackTransport) -> list[Any]:
        sent = recorded(transport)
        transport.all_gather_object = None  # type: ignore[assignment, method-assign]
        assert compared(weights(), transport) == ""
        return sent

    assert on_ranks(sizes) == [[("all_reduce", "weights", 256)]] * 2


def merged_of(model: nn.Module, transport: Transport, **options: Any) -> MergedOptimizer:
    return MergedOptimizer(
        options.pop("optimizer", SGD)(model.parameters(), lr=0.1),
        model.named_parameters(),
        transport=transport,
        link=AlphaBeta(1e-6, 1e-3),
        planner="wfbp",
        warmup_steps=2,
        **{"detect_divergence_every_n_steps": 3, **options},
    )


def train(transport: Transport, skipped: int, options: dict[str, Any]) -> str:
    """Seven steps, of which rank 1 takes the one numbered `skipped` without its optimizer."""
    model = Layers()
    model.layers[1].bias.requires_grad_(False)
    merged = merged_of(model, transport, **dict(options))
    try:
        for step in range(7):
            merged.zero_grad()
            # rank 1 never uses the last layer: other gradients, the same weights
            backward(model, data_of(transport.rank, step), (0, 1, 2)[: 3 - transport.rank])
            if step == skipped and transport.rank == 1:
                kept = [p.detach().clone() for p in model.parameters()]
            merged.step()
            if step == skipped and transport.rank == 1:
                for p, before in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(before)
    except RuntimeError as error:
        return str(error)
    finally:
        merged.close()
    return ""


TRAININGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "adam": {"optimizer": Adam},
    "bf16": {"compressor": "bf16"},
    "topk": {"compressor": TopK(0.2, momentum_correction=0.9, dense_below_numel=0)},
    "randomk": {"compressor": RandomK(0.2, dense_below_numel=0)},
    "int8": {"compressor": Quantize8(dense_below_numel=0)},
    "powersgd": {"compressor": PowerSGD(rank=1, dense_below_numel=0)},
}
NUMBER = r"-?\d\.\d+(e-\d+)?"
WITH_WORDS = re.compile(
    rf"'layers\.0\.weight'\[0, 0\] is {NUMBER} on rank 0 and {NUMBER} on rank 1; 5 of 6 parameters"
)


@pytest.mark.filterwarnings("ignore:.*has no effect.*:UserWarning")
@pytest.mark.parametrize("options", TRAININGS.values(), ids=TRAININGS)
def test_no_exchange_lets_ranks_diverge(options: dict[str, Any]) -> None:
    """A false alarm, or a compressor that decodes otherwise on another rank."""
    assert on_ranks(train, -1, options) == ["", ""]


def test_a_skipped_step_shows_at_the_next_comparison() -> None:
    """Weights are not compared after every third step, when the next exchange is complete."""
    first, second = on_ranks(train, 3, {})
    assert first == second
    assert "differ after 6 steps" in first
    assert WITH_WORDS.search(first)


def over_torch(rank: int, skipped: int) -> str:
    transport = TorchTransport()
    try:
        return train(transport, skipped, {})
    finally:
        transport.close()


def test_over_gloo() -> None:
    """Real processes disagree on what they compare, or hang when one of them is right."""
    assert run_ranks(over_torch, -1) == ["", ""]
    first, second = run_ranks(over_torch, 1)
    assert first == second
    assert WITH_WORDS.search(first)


@pytest.mark.horovod
def test_over_horovod() -> None:
    """The same over the other transport."""
    first, second = on_horovod_ranks(train, 1, {})
    assert first == second
    assert WITH_WORDS.search(first)


@pytest.mark.parametrize("looks_on", [(), (0,), (0, 1)], ids=str)
def test_deferred_steps_stay_deferred(
    looks_on: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are compared while an update is pending, a step is taken whole for it, or the ranks
    wait for each other where one looked at its weights earlier, in a state_dict()."""
    deferred: list[None] = []
    defer = CrossIteration.defer
    monkeypatch.setattr(CrossIteration, "defer", lambda c: (deferred.append(None), defer(c))[1])

    def train_deferred(transport: LoopbackTransport, spoils: bool) -> str:
        model = Layers()
        merged = merged_of(model, transport, schedule="cross_iteration", module=model)
        try:
            for step in range(9):
                merged.zero_grad()
                backward(model, data_of(transport.rank, step))
                if spoils and step == 4 and transport.rank == 1:
                    merged.flush()
                    model.layers[2].bias.data[0] += 1
                merged.step()
                if transport.rank in looks_on:
                    model.state_dict()
        except RuntimeError as error:
            return str(error)
        finally:
            merged.close()
        return ""

    assert on_ranks(train_deferred, False) == ["", ""]
    assert len(deferred) == 2 * (9 - 2)  # all but the warm-up's
    first, second = on_ranks(train_deferred, True)
    assert first == second
    # the sixth exchange has shown it, the step after that says so
    assert "differ after 7 steps: 'layers.2.bias'[0] is " in first
