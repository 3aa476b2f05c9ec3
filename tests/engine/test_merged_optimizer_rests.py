"""A failure here is a training whose steps and rests do not belong together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from network_examples import COMPRESSORS, batch, each, merged_of, network, train
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.compressors import TopK
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Pending


def train_on_gloo(rank: int, compressor: str, steps: int) -> Any:
    return train(TorchTransport.world(), compressor, steps)


@each
def test_on_gloo(compressor: str) -> None:
    """Ranks drift apart, or a message on its way is overwritten."""
    ours, theirs = run_ranks(train_on_gloo, compressor, 8)
    assert all(map(same_bits, ours[0], theirs[0]))
    threads = on_ranks(train, compressor, 8)
    assert all(r.any() for n, r in ours[1].items() if "weight" in n)
    for p, other, before in zip(ours[0], threads[0][0], network().parameters(), strict=True):
        torch.testing.assert_close(p, other, rtol=1e-3, atol=1e-4)
        assert not torch.equal(p, before)


@pytest.mark.parametrize("compressor", ["topk", "randomk", "int8"])
def test_all_that_the_steps_applied_was_given(compressor: str) -> None:
    """Steps apply something else than was sent. With a linear loss, whose gradients are the same
    everywhere, weights and mean rest make up the path of dense training."""

    def train(transport: LoopbackTransport) -> tuple[Tensor, Tensor]:
        model = nn.Linear(16, 16, bias=False)
        nn.init.zeros_(model.weight)
        merged = merged_of(model, transport, compressor)
        total = torch.zeros(16, 16)
        for s in range(6):
            merged.zero_grad()
            gradient = torch.randn(
                16, 16, generator=torch.Generator().manual_seed(101 * s + transport.rank)
            )
            (model.weight * gradient).sum().backward()
            merged.step()
            total += gradient
        left = merged.reducer.exchanger.state_dict()["residual"]["weight"]
        return model.weight.detach(), total - left

    ranks = on_ranks(train)
    owed = sum(sent for _, sent in ranks) / 2
    for weight, _ in ranks:
        torch.testing.assert_close(weight, -0.125 * owed, rtol=1e-4, atol=1e-5)


def test_clipping_waits_for_the_whole_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is sent before the norm of all is known, or what was sent is not what was clipped."""
    compressor = TopK(0.1, local_clip_norm=0.01, dense_below_numel=20)
    monkeypatch.setitem(COMPRESSORS, "clipped", compressor)

    def run(transport: LoopbackTransport) -> None:
        events: list[str] = []
        model = network()
        merged = merged_of(model, transport, "clipped")
        start = merged.reducer.exchanger.start

        def recording(*args: Any, **kwargs: Any) -> Any:
            events.append("sent")
            return start(*args, **kwargs)

        merged.reducer.exchanger.start = recording
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda _: events.append("fired"))
        for s in range(4):
            events.clear()
            merged.zero_grad()
            model(batch(transport.rank, s)).square().mean().backward()
            assert set(events) == {"fired"}
            merged.step()
            assert events.count("sent") == (6 if merged.plan else 1) or s == 1
        assert merged.tuned is not None
        *_, end = merged.tuned.profile.ready_seconds
        assert merged.tuned.profile.ready_seconds[0] < end  # as it was measured
        assert all(span.begin_seconds >= end for span in merged.tuned.timeline.spans)

    on_ranks(run)


def test_schedules_go_by_set_epoch() -> None:
    """The schedule stays at its first epoch, or the step that follows does not heed it."""
    compressor = TopK(0.01, density_schedule=[0.4, 0.1], dense_below_numel=20)
    model = nn.Linear(100, 10, bias=False)
    transport = LoopbackTransport.solo()
    sizes: list[int] = []
    gather = transport.all_gather

    def all_gather(output: Tensor, buffer: Tensor, *, key: str) -> Pending:
        sizes.append(buffer.nbytes)
        return gather(output, buffer, key=key)

    transport.all_gather = all_gather  # type: ignore[method-assign]
    merged = MergedOptimizer(
        SGD(model.parameters(), lr=0.1),
        model.named_parameters(),
        transport=transport,
        compressor=compressor,
        warmup_steps=10,
    )
    for epoch in range(3):
        merged.set_epoch(epoch)
        for _ in range(2):
            model(torch.randn(4, 100)).square().mean().backward()
            merged.step()
    assert sizes == [n for k in (400, 100, 10) for n in 2 * [8 * k + 16]]


REFUSED: list[tuple[type[Optimizer], dict[str, Any], str]] = [
    (SGD, {"momentum": 0.5}, r"got SGD\(momentum=0\.5\): it would count twice"),
    (Adam, {}, "got Adam: what it replaces is the momentum of SGD"),
    (AdamW, {}, "got AdamW: what it replaces is the momentum of SGD"),
    (RMSprop, {}, "got RMSprop: what it replaces is the momentum of SGD"),
]


@pytest.mark.parametrize(
    ("kind", "arguments", "words"), REFUSED, ids=[r[0].__name__ for r in REFUSED]
)
def test_momentum_counts_once(kind: Any, arguments: dict[str, Any], words: str) -> None:
    """Momentum correction on top of an optimizer's own momentum: updates ten times too large."""
    options = {"optimizer": kind, "arguments": arguments}
    with pytest.raises(ValueError, match=words):
        merged_of(network(), LoopbackTransport.solo(), "momentum", **copy.deepcopy(options))
    for compressor in ("topk", "randomk", ""):
        merged_of(network(), LoopbackTransport.solo(), compressor, **copy.deepcopy(options))
    merged_of(network(), LoopbackTransport.solo(), "momentum", arguments={"nesterov": False})


def test_a_param_group_with_momentum_is_seen_too() -> None:
    """Only the first param_group, or the default, is looked at."""
    model = network()
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others, "momentum": 0.25}]
    with pytest.raises(ValueError, match=r"momentum=0\.25"):
        MergedOptimizer(
            SGD(groups, lr=0.1),
            model.named_parameters(),
            transport=LoopbackTransport.solo(),
            compressor=COMPRESSORS["momentum"],
        )


def test_compressors_are_compared_over_ranks() -> None:
    """One rank sends other bytes than the others wait for."""

    def make(transport: LoopbackTransport) -> None:
        compressor = TopK(0.1 + 0.1 * transport.rank)
        model = network()
        with pytest.raises(RuntimeError, match=r"compressor\.density is 0\.1 on rank 0"):
            MergedOptimizer(
                SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                transport=transport,
                compressor=compressor,
            )

    on_ranks(make)
