"""A failure here means: a plain loop sees a step that is not complete, or loses or doubles one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_examples import Layers, data_of
from loopback import on_ranks
from torch import Tensor, optim

from lightning_mgwfbp import AlphaBeta
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport

STEPS = 6
USED = ((0, 1, 2), (2, 0), (1, 1, 2), (0,), (2, 1, 0), (1,))
Loop = Callable[[Layers, MergedOptimizer, int], list[Any]]


def deferring(model: Layers, transport: LoopbackTransport, **options: Any) -> MergedOptimizer:
    defaults = {"lr": 0.1, "momentum": 0.9}
    return MergedOptimizer(
        optim.SGD(model.parameters(), **{**defaults, **options}),
        model.named_parameters(),
        transport=transport,
        planner="wfbp",
        link=AlphaBeta(1e-3, 1e-9),
        warmup_steps=1,
        schedule="cross_iteration",
        module=model,
    )


def weights(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def by_both(loop: Loop) -> tuple[list[Any], list[Any]]:
    """What `loop` returns and the weights it ends with: deferred, on two ranks, and by one process
    that is given the mean of both losses."""
    model = Layers()

    def train(transport: LoopbackTransport) -> list[Any]:
        ours = copy.deepcopy(model)
        optimizer = deferring(ours, transport)
        seen = loop(ours, optimizer, transport.rank)
        optimizer.close()
        return [*seen, *weights(ours)]

    first, second = on_ranks(train)
    assert all(map(torch.equal, first, second))
    alone = copy.deepcopy(model)
    plain = optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    plain.flush = lambda: None  # type: ignore[attr-defined]
    return first, [*loop(alone, plain, -1), *weights(alone)]  # type: ignore[arg-type]


def loss_of(model: Layers, step: int, rank: int) -> Tensor:
    used = USED[step % len(USED)]
    if rank >= 0:
        return model(data_of(rank, step), used)
    return (model(data_of(0, step), used) + model(data_of(1, step), used)) / 2


def zero_first(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return []


def zero_last(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    for step in range(STEPS):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


def looked_at(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    """By all ways that need no flush, and by one that does."""
    seen = []
    for step in range(STEPS):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            with torch.inference_mode():
                seen.append(model(data_of(7), (0, 2)).clone())
        elif step % 4 == 1:
            seen += [v.clone() for v in model.state_dict().values()]
        elif step % 4 == 2:
            seen += [s["momentum_buffer"] for s in optimizer.state_dict()["state"].values()]
        else:
            optimizer.flush()
            seen += weights(model)
    return seen


def loaded(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    """Weights and states are put back in the middle, while a step is pending."""
    kept = copy.deepcopy(model.state_dict()), None
    for step in range(STEPS):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        if step == 4:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    return []


def thrown_away(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    """A bad batch: its gradients are cleared by the next zero_grad, without a step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if step != 3:
            optimizer.step()
    return []


def late_parts(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    """A second backward adds to gradients that are on their way already."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, more = loss_of(model, step, rank), loss_of(model, step + 10, rank)
        loss.backward()
        if step % 2:
            more.backward()
        optimizer.step()
    return []


def by_submodules(model: Layers, optimizer: Any, rank: int) -> list[Any]:
    """A module of the model's is called by itself first."""
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        seen.append(model.layers[1](data_of(step)).detach())
        loss_of(model, step, rank).backward()
        optimizer.step()
    return seen


@pytest.mark.parametrize(
    "loop", [zero_first, zero_last, looked_at, loaded, by_submodules, thrown_away, late_parts]
)
def test_a_plain_loop(loop: Loop) -> None:
    """Steps by the standalone wrapper are those of one process with all the data."""
    ours, theirs = by_both(loop)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_a_step_without_a_call_of_the_module_is_an_error() -> None:
    """Gradients of weights from before the last update, without a word."""
    model = Layers()
    optimizer = deferring(model, LoopbackTransport.solo())
    for step in range(3):
        model(data_of(step), (0, 1, 2)).backward()
        optimizer.step()
    sum(p.square().sum() for p in model.parameters()).backward()  # no module is called
    with pytest.raises(RuntimeError, match="The last step is not complete"):
        optimizer.step()
    optimizer.close()


def test_a_failed_update_stays_failed() -> None:
    """Half-updated weights are saved as if they were whole."""
    model = Layers()
    optimizer = deferring(model, LoopbackTransport.solo())
    for step in range(3):
        model(data_of(step), (0, 1, 2)).backward()
        optimizer.step()
    pending = optimizer.reducer._round
    finish = pending.finish_bucket

    def fail(number: int) -> None:
        if number == 1:
            raise RuntimeError("no network")
        finish(number)

    pending.finish_bucket = fail  # type: ignore[method-assign]
    for look in (lambda: model(data_of(4), (2, 1, 0)), model.layers[0].state_dict):
        with pytest.raises(RuntimeError, match="no network"):
            look()
    pending.finish_bucket = finish  # type: ignore[method-assign]
    optimizer.close()
