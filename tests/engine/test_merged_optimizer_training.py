"""A failure here is a step on something else than the mean of the gradients of all ranks."""

from typing import Any

import pytest
import torch
from engine_examples import ALL, Layers, backward, data_of, merge
from loopback import on_ranks
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, Optimizer

from lightning_mgwfbp.exchange.transport import LoopbackTransport


def on_mean_loss(
    model: Layers, optimizer: Optimizer, steps: int, world_size: int = 2, clip: float | None = None
) -> list[Tensor]:
    """The oracle: one process that trains on the mean of all ranks' losses."""
    for step in range(steps):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            losses = [model(data_of(rank, step), ALL) for rank in range(world_size)]
            loss = torch.stack(losses).mean()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            return loss

        optimizer.step(closure)
    return [p.detach() for p in model.parameters()]


def assert_weights(everyone: list[list[Tensor]], expected: list[Tensor]) -> None:
    for weights in everyone:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs, rtol=1e-9, atol=1e-12)


MOMENTUM: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
# no test of progress, which would look at the loss of this rank alone
LBFGS_OPTIONS = {"lr": 0.1, "max_iter": 4, "tolerance_grad": 0.0, "tolerance_change": 0.0}


@pytest.mark.parametrize(
    ("kind", "options", "with_closure"),
    [
        (SGD, MOMENTUM, False),
        (SGD, MOMENTUM, True),
        (Adam, {"lr": 0.01}, False),
        (Adam, {"lr": 0.01}, True),
        (LBFGS, LBFGS_OPTIONS, True),
    ],
    ids=["SGD", "SGD closure", "Adam", "Adam closure", "LBFGS closure"],
)
def test_it_trains_on_the_mean_over_the_ranks(
    kind: type[Optimizer], options: dict[str, Any], with_closure: bool
) -> None:
    """Averages come too late, or not at each call of the closure (LBFGS calls it often)."""

    def train(transport: LoopbackTransport) -> list[Tensor]:
        model = Layers()
        optimizer = merge(model, transport, kind, **options)
        for step in range(6):

            def closure(step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(data_of(transport.rank, step), ALL)
                loss.backward()
                return loss

            if with_closure:
                assert isinstance(optimizer.step(closure), Tensor)
            else:
                closure()
                optimizer.step()
        assert optimizer.plan is not None
        return list(model.parameters())

    model = Layers()
    expected = on_mean_loss(model, kind(model.parameters(), **options), 6)
    assert_weights(on_ranks(train), expected)


def test_synchronize_clip_step_exchanges_once() -> None:
    """step() averages again, after the clipping, what synchronize() has averaged."""

    def train(transport: LoopbackTransport) -> list[Tensor]:
        model = Layers()
        optimizer = merge(model, transport, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, data_of(transport.rank, step))
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            assert optimizer.reducer.exchanges == step + 1
        return list(model.parameters())

    model = Layers()
    expected = on_mean_loss(model, SGD(model.parameters(), lr=0.1), 4, clip=0.05)
    assert_weights(on_ranks(train), expected)


def test_accumulation_under_no_sync() -> None:
    """Micro-batches under no_sync are exchanged one by one, or never."""

    def train(transport: LoopbackTransport) -> list[Tensor]:
        model = Layers()
        optimizer = merge(model, transport, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            with optimizer.no_sync():
                (model(data_of(transport.rank, step), ALL) / 2).backward()
                optimizer.synchronize()  # does nothing here
            assert optimizer.reducer.exchanges == step
            (model(data_of(transport.rank, step), ALL) / 2).backward()
            optimizer.step()
        return list(model.parameters())

    model = Layers()
    assert_weights(on_ranks(train), on_mean_loss(model, SGD(model.parameters(), lr=0.1), 4))


def test_a_rank_without_backward_steps_with_the_others() -> None:
    """step() on a rank whose loss reached no parameter does not exchange, and the others hang."""

    def train(transport: LoopbackTransport) -> list[Tensor]:
        model = Layers()
        optimizer = merge(model, transport, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            backward(model, data_of(transport.rank, step), ALL if transport.rank == 0 else ())
            optimizer.step()
        return list(model.parameters())

    first, second = on_ranks(train)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], next(Layers().parameters()))


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """GradScaler sees this rank's gradients only: ranks step differently from then on."""

    def train(transport: LoopbackTransport) -> tuple[list[Tensor], float]:
        model = Layers()
        optimizer = merge(model, transport, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            before = [p.clone() for p in model.parameters()]
            optimizer.zero_grad()
            loss = model(data_of(transport.rank, step), ALL)
            if (step, transport.rank) == (1, 1):
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            same = all(map(torch.equal, before, model.parameters()))
            assert same == (step == 1)
        return list(model.parameters()), scaler.get_scale()

    first, second = on_ranks(train)
    assert first[1] == second[1] == 2
    assert all(map(torch.equal, first[0], second[0]))
