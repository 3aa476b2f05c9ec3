"""A failure here is a damaged exchange state that is taken up, in part or as a whole."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from damage import WRONG, damaged
from hypothesis import given, settings
from hypothesis import strategies as st
from loopback import on_ranks, same_bits
from network_examples import batch, network
from torch import Tensor
from torch.optim import SGD

from lightning_mgwfbp import AlphaBeta, MergedOptimizer, PowerSGD, TopK
from lightning_mgwfbp.exchange.transport import LoopbackTransport

Saved = dict[str, Any]
MOST_STEPS = 2**53

TENSORS = (
    torch.zeros(2),
    torch.zeros(0),
    torch.tensor(1.0),
    torch.full((16, 6), float("nan")),
    torch.full((16, 6), float("inf")),
    torch.zeros(16, 6, dtype=torch.complex64),
    torch.zeros(16, 6, dtype=torch.int64),
    torch.zeros(16, 6, dtype=torch.bool),
    torch.zeros(16, 6).to_sparse(),
)


METHODS = {
    "momentum": TopK(0.1, momentum_correction=0.9, dense_below_numel=20),
    "powersgd": PowerSGD(rank=2, dense_below_numel=20),
}


def trained(transport: LoopbackTransport, steps: int, method: str = "momentum") -> MergedOptimizer:
    model = network()
    merged = MergedOptimizer(
        SGD(model.parameters(), lr=0.125),
        model.named_parameters(),
        transport=transport,
        compressor=METHODS[method],
        planner="wfbp",
        link=AlphaBeta(1e-9, 1.0),
        warmup_steps=2,
    )
    for step in range(steps):
        merged.zero_grad()
        model(batch(transport.rank, step)).square().mean().backward()
        merged.step()
    return merged


@cache
def saved_bytes(method: str = "momentum") -> bytes:
    """Of two ranks, with a plan."""

    def save(transport: LoopbackTransport) -> Saved | None:
        state: Saved | None = trained(transport, 4, method).exchange_state_dict()
        return state

    file = io.BytesIO()
    torch.save(on_ranks(save)[0], file)
    return file.getvalue()


def saved_state(method: str = "momentum") -> Saved:
    state: Saved = torch.load(io.BytesIO(saved_bytes(method)), weights_only=True)
    return state


def state_of(merged: MergedOptimizer) -> tuple[Any, ...]:
    """All that a resumed training could find changed, but for tensors."""
    exchanger = merged.reducer.exchanger
    return (
        merged.plan,
        merged.reducer.plan,
        merged.reducer.known.rowwise,
        exchanger.state_dict().get("step"),
    )


def tensors_of(merged: MergedOptimizer) -> dict[tuple[str, str], Tensor]:
    state = merged.reducer.exchanger.state_dict()
    return {(k, n): t for k in state if k != "step" for n, t in state[k].items()}


def load(merged: MergedOptimizer, saved: Any) -> str:
    """What is said of `saved`, with nothing changed; empty if it was taken up."""
    before, rests = state_of(merged), tensors_of(merged)
    try:
        merged.load_exchange_state_dict(saved)
    except ValueError as error:
        text = str(error)
    else:
        return ""
    assert text.startswith("checkpoint['mgwfbp']: ")
    assert len(text) < 400
    assert state_of(merged) == before
    after = tensors_of(merged)
    assert after.keys() == rests.keys()
    assert all(same_bits(after[key], rest) for key, rest in rests.items())
    return text


@pytest.mark.parametrize("method", METHODS)
@settings(deadline=None)
@given(st.data())
def test_any_part_is_another(method: str, data: st.DataObject) -> None:
    """Another error than one that names the part, or a state that was taken up in part."""
    good = saved_state(method)
    merged = trained(LoopbackTransport.solo(), 2, method)
    if not load(merged, data.draw(damaged(good, (*WRONG, *TENSORS)))):
        trained_on(merged)


def trained_on(merged: MergedOptimizer) -> None:
    """What was taken up can be trained with."""
    merged.zero_grad()
    for p in (p for group in merged.param_groups for p in group["params"]):
        p.square().sum().backward()
    merged.step()


def _with(change: Callable[[Saved], Any]) -> Saved:
    saved = copy.deepcopy(saved_state())
    change(saved)
    return saved


def rests(saved: Saved, rank: int = 1, kind: str = "residual") -> Any:
    return saved["exchanger"][rank][kind]


ONE = {"2.weight": torch.ones(16, 1)}
ALIEN = {"9.weight": torch.ones(2)}
NAN = {"2.weight": torch.full((16, 16), float("nan"))}
WHOLE = {"2.weight": torch.ones(16, 16, dtype=torch.int32)}
DAMAGES: dict[str, tuple[Callable[[Saved], Any], str]] = {
    "no plan": (lambda s: s.pop("plan"), "lacks the key 'plan'"),
    "plan": (lambda s: s.update(plan="{"), "plan: not JSON"),
    "plan's groups": (
        lambda s: s.update(plan=s["plan"].replace("groups", "group")),
        "plan: lacks the key 'groups'",
    ),
    "no ranks": (lambda s: s["exchanger"].clear(), "exchanger must have a state for each rank"),
    "a rank": (lambda s: s["exchanger"].append(3), "exchanger[2]: must be a mapping, got 3"),
    "step": (lambda s: s["exchanger"][0].update(step=-1), "exchanger[0]: step must be a whole"),
    "large step": (
        lambda s: s["exchanger"][0].update(step=10**30),
        f"exchanger[0]: step must be at most {MOST_STEPS:,}",
    ),
    "another step": (lambda s: s["exchanger"][1].update(step=3), "exchanger[1]: step is 3, but 4"),
    "kind": (lambda s: s["exchanger"][1].update(residual=[]), "exchanger[1]: residual must be a"),
    "shape": (lambda s: rests(s).update(ONE), "residual of '2.weight' has shape (16, 1), but the"),
    "nan": (lambda s: rests(s).update(NAN), "residual of '2.weight' has infinite numbers or NaN"),
    "dtype": (lambda s: rests(s).update(WHOLE), "'2.weight' must be a tensor of floating-point"),
    "name": (lambda s: rests(s).update(ALIEN), "residual names '9.weight', which is no parameter"),
    "rowwise": (lambda s: s.update(rowwise="0"), "rowwise must be a list, got '0'"),
    "rowwise name": (lambda s: s["rowwise"].append("9.weight"), "rowwise names '9.weight', which"),
    "made_for": (lambda s: s.update(made_for=3), "made_for must be a mapping, got 3"),
}


@pytest.mark.parametrize(("change", "said"), DAMAGES.values(), ids=DAMAGES)
def test_the_part_is_named(change: Callable[[Saved], Any], said: str) -> None:
    """The first error is about something else, or a rank is left with another state."""
    text = load(trained(LoopbackTransport.solo(), 2), _with(change))
    assert said in text


def test_factors_of_two_shapes_cannot_be_folded() -> None:
    """Another number of ranks ends in an error about shapes, after residuals were taken up."""
    saved = saved_state("powersgd")
    saved["exchanger"][1]["factor"]["2.weight"] = torch.ones(3, 16)
    text = load(trained(LoopbackTransport.solo(), 2, "powersgd"), saved)
    assert "exchanger[1]: the factor of '2.weight' has shape (3, 16), but" in text


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_ranks_damage_is_every_ranks_error(odd: int) -> None:
    """The other ranks take it up, and wait for the one that has raised."""
    bad = _with(lambda saved: saved.pop("plan"))

    def resume(transport: LoopbackTransport) -> str:
        merged = trained(transport, 2)
        before = tensors_of(merged)
        with pytest.raises(ValueError, match="lacks") as error:
            merged.load_exchange_state_dict(bad if transport.rank == odd else saved_state())
        after = tensors_of(merged)
        assert all(same_bits(after[key], rest) for key, rest in before.items())
        return str(error.value)

    texts = on_ranks(resume, world_size=3)
    assert texts == [f"On rank {odd}: checkpoint['mgwfbp']: lacks the key 'plan'"] * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda s: s.update(plan=None),
            "checkpoint['mgwfbp'].plan is MergePlan on rank 0 and None",
        ),
        (
            lambda s: rests(s)["2.weight"].view(-1)[3].add_(1),
            "[1]['residual']['2.weight'] is Tensor",
        ),
    ],
)
def test_ranks_with_different_states(change: Callable[[Saved], Any], named: str) -> None:
    """They go on with different plans, and wait for each other for ever; or with other rests."""

    def resume(transport: LoopbackTransport) -> str:
        merged = trained(transport, 2)
        with pytest.raises(RuntimeError, match="disagree") as error:
            merged.load_exchange_state_dict(_with(change) if transport.rank else saved_state())
        return str(error.value)

    first, second = on_ranks(resume)
    assert first == second
    assert named in first
