"""A failure here is something that grows with the length of a training, or a bit lost on the way.

Numbers of steps are what some seconds pay for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from horovod_ranks import on_horovod_ranks
from ranks import run_ranks, train_ranks
from soak_examples import Books, Footprint, Layers, Steps, Training, assert_no_growth, footprint
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from training import Toy, ToyData, make_strategy, quiet_trainer

from lightning_mgwfbp import AlphaBeta, TopK
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport

pytestmark = pytest.mark.slow

Named = dict[str, Tensor]
CHECKS = 5
TOP = TopK(0.2, dense_below_numel=5)
DENSE = {"link": AlphaBeta(1e-4, 1e-8), "planner": "threshold"}
SPARSE = {"link": AlphaBeta(1e-3, 1e-3), "planner": "wfbp", "compressor": TOP}
REPLANNED = {"warmup_steps": 2, "replan_every_n_steps": 20}


def merged(model: nn.Module, **options: Any) -> MergedOptimizer:
    sgd = SGD(model.parameters(), lr=0.05, momentum=0.9)
    return MergedOptimizer(sgd, model.named_parameters(), module=model, **REPLANNED, **options)


def soak(
    trainings: Sequence[Training],
    rank: int,
    steps: int,
    look: Callable[[], None],
    **kept: bool,
) -> list[Footprint]:
    """Step all of them alike; `CHECKS` times look and take the footprint.

    Args:
        kept: fields that all steps have in common.
    """
    drawn, footprints = Steps(seed=2), []
    for number in range(1, steps + 1):
        is_checked = number % (steps // CHECKS) == 0
        step = replace(drawn.whole() if is_checked else drawn.draw(), **kept)
        for training in trainings:
            training.step(step, rank, number)
        if is_checked:
            look()
            footprints.append(footprint())
    return footprints


def assert_steady(ranks: Sequence[Sequence[Footprint]]) -> None:
    for warm, *later in ranks:
        for footprint_ in later:
            assert_no_growth(warm, footprint_)


def beside_ddp(
    rank: int, steps: int, options: dict[str, Any], kept: dict[str, bool]
) -> list[Footprint]:
    """Bit for bit the same weights wherever one looks."""
    torch.manual_seed(0)
    model = Layers()
    other = copy.deepcopy(model)
    scaler: dict[str, Any] = {}
    if not kept:
        scaler = {"scaler": GradScaler("cpu", 1024.0, growth_interval=20)}
    optimizer = merged(model, grad_scaler=scaler.get("scaler"), **options)
    ours = Training(model, model, optimizer, **scaler)
    wrapped = DistributedDataParallel(other, find_unused_parameters=True)
    theirs = Training(
        other, wrapped, SGD(other.parameters(), lr=0.05, momentum=0.9), **copy.deepcopy(scaler)
    )

    def look() -> None:
        optimizer.flush()
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, its)
            assert mine.isfinite().all()

    footprints = soak([ours, theirs], rank, steps, look, **kept)
    optimizer.close()
    assert optimizer.reducer.known.version > 1  # some have left the plan, and come back
    return footprints


def test_dense_steps() -> None:
    """Accumulation, skipped and overflowing steps, frozen parameters or new plans leave a rest."""
    assert_steady(run_ranks(beside_ddp, 2000, DENSE, {}))


# there is no scaler, and gradients are gone after a step
UNSCALED = {"overflows": False, "set_to_none": True}


def test_deferred_steps() -> None:
    """The same of what is under way between steps: threads, hooks, memory to receive in."""
    options = {**DENSE, "schedule": "cross_iteration"}
    assert_steady(run_ranks(beside_ddp, 1000, options, UNSCALED))


def over_horovod(transport: Transport, steps: int) -> list[Footprint]:
    return beside_ddp(transport.rank, steps, {**DENSE, "transport": transport}, UNSCALED)


@pytest.mark.horovod
def test_steps_over_horovod() -> None:
    """The same of names and handles."""
    assert_steady(on_horovod_ranks(over_horovod, 1000))


def compressed(rank: int, steps: int) -> tuple[list[Footprint], list[Tensor], Named, Named, Named]:
    """The footprints; weights; what was given, received and left behind."""
    torch.manual_seed(0)
    model = Layers(torch.float64)
    books = Books(model)
    optimizer = MergedOptimizer(
        SGD(model.parameters(), lr=0.05), model.named_parameters(), **REPLANNED, **SPARSE
    )
    training = Training(model, model, optimizer, books=books)
    footprints = soak([training], rank, steps, lambda: None, **UNSCALED)
    left = optimizer.reducer.exchanger.state_dict()["residual"]
    optimizer.close()
    weights = [p.detach() for p in model.parameters()]
    return footprints, weights, books.given, books.received, left


def test_compressed_steps() -> None:
    """What was given is neither received nor left behind, or what is left behind piles up."""
    ours, theirs = run_ranks(compressed, 1500)
    assert_steady([ours[0], theirs[0]])
    assert all(map(torch.equal, ours[1], theirs[1]))
    for name, received in ours[3].items():
        assert torch.equal(received, theirs[3][name])
        given = (ours[2][name] + theirs[2][name]) / 2
        left = (ours[4].get(name, 0) + theirs[4].get(name, 0)) / 2  # small ones leave nothing
        torch.testing.assert_close(received + left, given, rtol=1e-9, atol=1e-9)


def replanned(_: int, plans: int) -> list[Footprint]:
    """Every second step ends with a new plan."""
    model = Layers()
    optimizer = MergedOptimizer(
        SGD(model.parameters(), lr=0.05),
        model.named_parameters(),
        transport=LoopbackTransport.solo(),
        planner="single",  # others take longer to make
        link=AlphaBeta(1e-4, 1e-8),
        warmup_steps=1,
        replan_every_n_steps=1,
        schedule="cross_iteration",
        module=model,
    )
    training, step = Training(model, model, optimizer), Steps(seed=1, world_size=1).whole()
    footprints = []
    for number in range(1, plans + 1):
        before = optimizer.tuned
        training.step(step, 0, 2 * number)
        assert optimizer.tuned is not before
        training.step(step, 0, 2 * number + 1)
        assert optimizer.plan is None  # and the next one is to be made
        if number % (plans // CHECKS) == 0:
            optimizer.flush()
            footprints.append(footprint())
    optimizer.close()
    return footprints


def test_plans() -> None:
    """A plan in the place of another leaves hooks, buckets, threads or what was measured."""
    assert_steady(run_ranks(replanned, 500, world_size=1))


WAYS: tuple[dict[str, Any], ...] = ({}, {"compressor": TOP}, {"schedule": "cross_iteration"})


def fits(_: int, rounds: int) -> list[Footprint]:
    footprints = []
    for number in range(1, rounds + 1):
        for way in WAYS:
            strategy = make_strategy("mgwfbp", warmup_steps=1, link=AlphaBeta(1e-4, 1e-8), **way)
            quiet_trainer(strategy=strategy, max_steps=4).fit(Toy(), ToyData())
        if number % (rounds // CHECKS) == 0:
            footprints.append(footprint())
    return footprints


def test_fits_in_one_process() -> None:
    """A fit leaves process groups, connections, hooks or threads behind."""
    assert_steady(train_ranks(fits, 10))


def refused(_: int) -> tuple[Footprint, Footprint]:
    model = Layers().requires_grad_(False)
    before = footprint()
    for _ in range(5):
        with pytest.raises(ValueError, match="no trainable parameter"):
            merged(model, schedule="cross_iteration", **DENSE)
    return before, footprint()


def test_what_cannot_begin_leaves_nothing_open() -> None:
    """An error comes after process groups or threads that nobody closes then."""
    for before, after in run_ranks(refused):
        assert_no_growth(before, after)
