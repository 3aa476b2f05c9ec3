"""A failure here is a rest that is not what was given and not sent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from exchange_examples import (
    COMPRESSORS,
    EXACT_BELOW,
    NAMES,
    SHAPES,
    SPLIT,
    compressed_run,
    each,
)
from loopback import on_ranks, same_bits
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import Compressor, TopK
from lightning_mgwfbp.exchange.transport import LoopbackTransport


@each
@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_and_rest_make_up_what_was_given(compressor: Compressor, world_size: int) -> None:
    """A weight, a sign, or a compressor's rest; here with numbers that round."""

    def train(transport: LoopbackTransport) -> Any:
        run = compressed_run(transport, compressor, SPLIT)
        given = [run.gradients(s) for s in range(10)]
        return given, [run.step(s) for s in range(10)], run.state["residual"]

    ranks = on_ranks(train, world_size=world_size)
    for n in ("large", "filters", "bias"):
        given = sum(g[n].double() for gradients, _, _ in ranks for g in gradients)
        sent = sum(a[n].double() for a in ranks[0][1]) * world_size
        left = sum(rests[n].double() for _, _, rests in ranks)
        torch.testing.assert_close(sent + left, given, rtol=1e-5, atol=1e-4)


class Reference:
    """One rank of Deep Gradient Compression's algorithm 1, with momentum factor masking."""

    def __init__(self, momentum: float, density: float = 0.1) -> None:
        self.momentum = momentum
        self.k = round(1000 * density)
        self.velocity, self.total = torch.zeros(1000), torch.zeros(1000)

    def step(self, gradient: Tensor, left: Tensor) -> Tensor:
        """Return what is sent; `left` decides between equal magnitudes."""
        self.velocity = self.momentum * self.velocity + gradient.view(-1).float()
        self.total = self.total + self.velocity
        is_sent = (self.total != 0) & (left.view(-1) == 0)
        assert int(is_sent.sum()) == self.k
        assert self.total[is_sent].abs().min() >= self.total[~is_sent].abs().max()
        sent = torch.where(is_sent, self.total, 0.0)
        self.total[is_sent] = 0.0
        self.velocity[is_sent] = 0.0
        return sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_twenty_steps_of_deep_gradient_compression(momentum: float, dtype: torch.dtype) -> None:
    """Another algorithm; or rests and velocities of narrow gradients are rounded."""
    compressor = TopK(0.1, momentum_correction=momentum, dense_below_numel=EXACT_BELOW)

    def train(transport: LoopbackTransport) -> list[tuple[Tensor, Tensor]]:
        run = compressed_run(transport, compressor, SPLIT[:1], dtype)
        reference = Reference(momentum)
        seen = []
        for s in range(20):
            average = run.step(s)["large"].view(-1)
            state = run.state
            sent = reference.step(run.gradients(s)["large"], state["residual"]["large"])
            assert torch.equal(state["residual"]["large"].view(-1), reference.total)
            if momentum:
                assert torch.equal(state["velocity"]["large"].view(-1), reference.velocity)
            seen.append((average, sent))
        return seen

    for (average, ours), (other_average, theirs) in zip(*on_ranks(train), strict=True):
        assert torch.equal(average, (ours / 2 + theirs / 2).to(dtype))
        assert same_bits(average, other_average)


def test_what_a_flush_rounds_is_kept() -> None:
    """A rest that is sent whole in a narrow dtype loses what that dtype cannot hold."""
    run = compressed_run(LoopbackTransport.solo(), COMPRESSORS["topk"], SPLIT[:1], torch.bfloat16)
    run.step(0)
    before = run.state["residual"]["large"]
    everything = before + run.gradients(1)["large"].float()
    average = run.step(1, density=1.0)["large"]
    assert torch.equal(average, everything.bfloat16())
    left = run.state["residual"]["large"]
    assert left.any()
    assert torch.equal(left, everything - average.float())


@pytest.mark.parametrize("poison", NAMES[:4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@each
def test_what_is_not_finite_changes_no_rest(
    compressor: Compressor, momentum: float, poison: str
) -> None:
    """After an overflow on one rank in one bucket rests differ, or some rank does not see it."""
    if momentum:
        if not isinstance(compressor, TopK):
            return
        compressor = TopK(0.1, momentum_correction=momentum, dense_below_numel=EXACT_BELOW)

    def train(transport: LoopbackTransport) -> None:
        groups = (("large",), ("filters", "bias"), ("scalar", "empty"))
        run = compressed_run(transport, compressor, groups)
        run.step(0)
        before = run.state
        for s in (1, 2):
            averages = run.step(s, poison=poison if transport.rank == 1 else "")
            assert not all(a.isfinite().all() for a in averages.values())
            after = run.state
            assert after.pop("step") == s + 1
            for kind, rests in after.items():
                assert all(same_bits(r, before[kind][n]) for n, r in rests.items())
        assert all(a.isfinite().all() for a in run.step(3).values())
        assert not same_bits(run.state["residual"]["large"], before["residual"]["large"])

    on_ranks(train)


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, math.nan]),
        torch.tensor([[0.0, 0.0], [1.0, math.inf]]).to_sparse(1),
        torch.tensor([1.0, complex(math.inf, 0.0)]),
    ],
    ids=["strided", "sparse", "complex"],
)
def test_what_was_averaged_elsewhere_counts_too(other: Tensor) -> None:
    """A late part or sparse rows overflow, the step is skipped, and rests are lost."""
    run = compressed_run(LoopbackTransport.solo(), COMPRESSORS["topk"])
    run.step(0, others=[other.nan_to_num() if other.layout is torch.strided else other * 0])
    before = run.state["residual"]
    run.step(1, others=[other])
    assert all(same_bits(r, before[n]) for n, r in run.state["residual"].items())


@each
def test_rests_are_not_in_units_of_the_loss_scale(compressor: Compressor) -> None:
    """A change of the loss scale changes what rests are worth."""
    plain = compressed_run(LoopbackTransport.solo(), compressor)
    scaled = compressed_run(LoopbackTransport.solo(), compressor)
    scales = [2.0**16, 2.0**3, 2.0**-4, 2.0**16]
    for s, scale in enumerate(scales):
        scaled.exchanger.gradient_scale = lambda scale=scale: scale  # type: ignore[misc]
        averages = scaled.step(s, scale=scale, density=1.0 if s == 2 else None)
        expected = plain.step(s, density=1.0 if s == 2 else None)
        for n in NAMES:
            assert torch.equal(averages[n], scale * expected[n])
            assert same_bits(
                scaled.state["residual"].get(n, expected[n]),
                plain.state["residual"].get(n, expected[n]),
            )


def test_ranks_that_clip_and_others_keep_rests_of_the_same_parameters() -> None:
    """The rank that clipped has more to save than the others, which do not take part."""

    def clip(transport: LoopbackTransport) -> list[str]:
        compressor = TopK(0.1, local_clip_norm=90.0, dense_below_numel=EXACT_BELOW)
        run = compressed_run(transport, compressor, SPLIT)
        run.step(0, scale=1.0 if transport.rank else 10.0, density=1.0)
        return [*run.state, *run.state.get("residual", {})]

    ours, theirs = on_ranks(clip)
    assert ours == theirs


@each
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_the_mean_of_rests_survives_another_number_of_ranks(
    compressor: Compressor, world_size: int
) -> None:
    """Resumed on more or fewer ranks, the model owes other gradients than before."""

    def leave(transport: LoopbackTransport) -> dict[str, Any]:
        run = compressed_run(transport, compressor)
        for s in range(2):
            run.step(s)
        return run.state

    saved = on_ranks(leave)

    def resume(transport: LoopbackTransport) -> dict[str, Any]:
        run = compressed_run(transport, compressor)
        run.exchanger.load_state_dict(saved)
        return run.state

    resumed = on_ranks(resume, world_size=world_size)
    assert {state["step"] for state in resumed} == {2}
    for n in ("large", "filters"):
        before = torch.stack([state["residual"][n] for state in saved]).mean(0)
        after = torch.stack([state["residual"][n] for state in resumed]).mean(0)
        torch.testing.assert_close(after, before)


def test_a_state_of_another_method() -> None:
    """A run that is resumed with another compressor ends in a KeyError, or with its factors."""
    run = compressed_run(LoopbackTransport.solo(), COMPRESSORS["topk"])
    rest = torch.ones(SHAPES["large"])
    run.exchanger.load_state_dict(
        [{"residual": {"large": rest}, "factor": {"large": torch.ones(20, 4)}}]
    )
    assert torch.equal(run.state["residual"]["large"], rest)
    run.exchanger.load_state_dict([{"step": 3, "velocity": {"large": rest}}])
    run.step(0)
    assert run.state.keys() == {"step", "residual"}
    assert run.state["step"] == 4
