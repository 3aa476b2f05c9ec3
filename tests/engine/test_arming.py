"""A failure here is a backward of the user's own that is taken for training's, or the reverse."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
from engine_examples import Layers, data_of, lasting, plan_of
from loopback import on_ranks, record_keys
from torch import Tensor

from lightning_mgwfbp import AlphaBeta, MergedOptimizer, PowerSGD, Quantize8, RandomK, TopK
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.exchangers import DenseExchanger
from lightning_mgwfbp.exchange.transport import LoopbackTransport

ALL = (0, 1, 2)
LINK = AlphaBeta(1e-6, 1e-3)


def merged(model: Layers, transport: LoopbackTransport, **options: Any) -> MergedOptimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return MergedOptimizer(
        optimizer,
        model.named_parameters(),
        transport=transport,
        link=LINK,
        warmup_steps=2,
        planner="wfbp",
        **options,
    )


def loss_of(model: Layers, rank: int, step: int) -> Tensor:
    return model(data_of(rank, step), ALL)


def train(
    transport: LoopbackTransport,
    attacks: str = "",
    attacked_from: int = 0,
    with_module: bool = False,
    **options: Any,
) -> tuple[dict[str, Tensor], int]:
    """Eight steps; weights, and how many groups were launched during training's backward.

    Args:
        attacks: "no_sync" or "cleared" for what is done about an attack before each step, or
            "elsewhere" for one that calls a layer instead of the module.
    """
    model, rank = Layers(), transport.rank
    if with_module:
        options["module"] = model
    optimizer = merged(model, transport, **options)
    keys = record_keys(transport)
    launched = 0
    for step in range(8):
        if attacks and step >= attacked_from:
            x = data_of(rank, step + 50).requires_grad_()
            with optimizer.no_sync() if attacks == "no_sync" else nullcontext():
                if attacks == "elsewhere":
                    loss = model.layers[0](x).square().mean()
                else:
                    loss = model(x, ALL)
                loss.backward()
            assert x.grad is not None
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        before = len(keys)
        loss.backward()
        launched += len(keys) - before
        optimizer.step()
    optimizer.close()
    return {name: value.clone() for name, value in model.state_dict().items()}, launched


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("attacked_from", [0, 5], ids=["before the plan", "after it"])
@pytest.mark.parametrize("attacks", ["no_sync", "cleared"])
@pytest.mark.parametrize("with_module", [False, True])
def test_an_attack_leaves_nothing(with_module: bool, attacks: str, attacked_from: int) -> None:
    """What zero_grad has cleared, or what belongs to no_sync, is part of the step."""
    plain = on_ranks(partial(train, with_module=with_module))
    attacked = on_ranks(
        partial(train, attacks=attacks, attacked_from=attacked_from, with_module=with_module)
    )
    for (ours, launched), (theirs, expected) in zip(attacked, plain, strict=True):
        same(ours, theirs)
        if attacks == "no_sync":
            assert launched == expected > 0


@pytest.mark.parametrize("schedule", ["backward", "cross_iteration"])
def test_with_a_module_its_call_arms(schedule: Any) -> None:
    """A backward through a layer alone is exchanged, on one rank or on all."""
    plain = on_ranks(partial(train, with_module=True, schedule=schedule))
    for ranks in ((0, 1), (0,)):

        def attack(transport: LoopbackTransport, ranks: Any = ranks) -> Any:
            attacks = "elsewhere" if transport.rank in ranks else ""
            return train(transport, attacks, with_module=True, schedule=schedule)

        for (ours, launched), (theirs, expected) in zip(on_ranks(attack), plain, strict=True):
            same(ours, theirs)
            assert launched == expected


@pytest.mark.parametrize(
    "compressor",
    [
        TopK(density=0.2, dense_below_numel=0),
        TopK(density=0.2, momentum_correction=0.9, dense_below_numel=0),
        RandomK(density=0.2, dense_below_numel=0),
        Quantize8(block_numel=8, dense_below_numel=0),
        PowerSGD(rank=1, dense_below_numel=0),
    ],
    ids=["topk", "momentum", "randomk", "int8", "powersgd"],
)
@pytest.mark.parametrize("averaged_first", [False, True], ids=["on its way", "averaged"])
def test_what_is_cleared_leaves_no_residual(compressor: Any, averaged_first: bool) -> None:
    """A residual, a velocity or the number of the step is that of a gradient thrown away."""

    def run(transport: LoopbackTransport, throws_away: bool) -> Any:
        model, rank = Layers(), transport.rank
        optimizer = MergedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            transport=transport,
            planner=plan_of(model, 2, 4),  # on which the bits depend
            compressor=compressor,
        )
        for step in range(6):
            if throws_away:
                loss_of(model, rank, step + 50).backward()
                if averaged_first:
                    optimizer.synchronize()
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        left = optimizer.reducer.exchanger.state_dict()
        optimizer.close()
        return dict(model.state_dict()), left

    thrown = on_ranks(partial(run, throws_away=True))
    plain = on_ranks(partial(run, throws_away=False))
    for (ours, left), (theirs, expected) in zip(thrown, plain, strict=True):
        same(ours, theirs)
        assert left.get("step") == expected.get("step")
        for kind in left.keys() - {"step"}:
            same(left[kind], expected[kind])


def test_an_attack_outside_of_no_sync_on_one_rank() -> None:
    """One rank's attack meets the others' training message, and all train on."""

    def attack(transport: LoopbackTransport) -> Any:
        return train(transport, "cleared" if transport.rank == 0 else "", attacked_from=4)

    with pytest.raises(RuntimeError, match="out of step"):
        on_ranks(attack)


def test_what_lies_in_grad_is_part_of_the_exchange() -> None:
    """Gradients that were assigned, or left by a backward that is nobody's, stay local."""

    def run(transport: LoopbackTransport) -> list[Tensor]:
        model, rank = Layers(), transport.rank
        optimizer = merged(model, transport, module=model)
        seen = []
        for step in range(6):
            optimizer.zero_grad()
            parameters = list(model.parameters())
            if step % 2:  # by torch.autograd.grad, and no backward at all
                gradients = torch.autograd.grad(loss_of(model, rank, step), parameters)
                for p, gradient in zip(parameters, gradients, strict=True):
                    p.grad = gradient
            else:  # a regularizer, before training's own backward
                sum(p.square().sum() * (1 + rank) for p in parameters).backward()
                loss_of(model, rank, step).backward()
            optimizer.step()
            seen.append(torch.cat([p.detach().flatten().clone() for p in parameters]))
        optimizer.close()
        return seen

    first, second = on_ranks(run)
    alone = _alone()
    for ours, other, expected in zip(first, second, alone, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def _alone() -> list[Tensor]:
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, rank, step) / 2).backward()
            if not step % 2:
                sum(p.square().sum() * (1 + rank) / 2 for p in model.parameters()).backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().flatten().clone() for p in model.parameters()]))
    return seen


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("half-way")


def test_a_backward_that_fails_and_is_caught() -> None:
    """What it had sent before it failed is stepped on, or each gradient is expected twice."""

    def run(transport: LoopbackTransport, fails: bool) -> tuple[dict[str, Tensor], int]:
        torch.manual_seed(0)
        first, second = Layers(), Layers()
        net = torch.nn.ModuleList([first, second])
        exchanger = DenseExchanger(transport)
        reducer = Reducer(lasting(net.named_parameters()), exchanger, is_always_armed=False)
        reducer.install(plan_of(net, *[1] * 12))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        keys = record_keys(transport)
        for step in range(6):
            optimizer.zero_grad()
            data = data_of(transport.rank, step)
            if fails and step == 3:
                bad = second(data + Failing.apply(first(data, ALL)), ALL)
                with suppress(ValueError), reducer.armed():
                    bad.backward()
                net.zero_grad()
            loss = first(data, ALL) + second(data, ALL)
            before = len(keys)
            with reducer.armed():
                loss.backward()
            launched = len(keys) - before
            reducer.synchronize()
            optimizer.step()
            reducer.stepped()
        reducer.close()
        return {name: value.clone() for name, value in net.state_dict().items()}, launched

    plain = on_ranks(partial(run, fails=False))
    failed = on_ranks(partial(run, fails=True))
    for (ours, launched), (theirs, expected) in zip(failed, plain, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14)
        assert launched == expected == 11


def test_a_picture_of_one_rank_behind_a_clip() -> None:
    """Averages that were clipped, then put back, are exchanged again, by that rank alone."""

    def run(transport: LoopbackTransport, pictures: tuple[int, ...]) -> dict[str, Tensor]:
        model, rank = Layers(), transport.rank
        optimizer = merged(model, transport)
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            if rank in pictures:
                averages = [p.grad for p in model.parameters()]
                model.zero_grad()
                with optimizer.no_sync():
                    loss_of(model, rank, step + 50).backward()
                for p, average in zip(model.parameters(), averages, strict=True):
                    p.grad = average
            optimizer.step()
        optimizer.close()
        return dict(model.state_dict())

    plain = on_ranks(partial(run, pictures=()))
    for ours, theirs in zip(on_ranks(partial(run, pictures=(0,))), plain, strict=True):
        same(ours, theirs)


def test_gradients_in_a_buffer_of_the_users() -> None:
    """Who clears and reads a flat buffer of its own, of which gradients are parts, sees nothing."""

    def run(transport: LoopbackTransport) -> list[Tensor]:
        model, rank = Layers(), transport.rank
        optimizer = merged(model, transport)
        numels = [p.numel() for p in model.parameters()]
        flat = torch.zeros(sum(numels), dtype=torch.float64)
        for p, part in zip(model.parameters(), flat.split(numels), strict=True):
            p.grad = part.view_as(p)
        seen = []
        for step in range(5):
            flat.zero_()
            loss_of(model, rank, step).backward()
            optimizer.synchronize()
            flat.mul_(0.5)
            seen.append(flat.clone())
            optimizer.step()
        optimizer.close()
        return [*seen, *(p.detach() for p in model.parameters())]

    first, second = on_ranks(run)
    assert all(map(torch.equal, first, second))
    model = Layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for rank in range(2):
            (loss_of(model, rank, step) / 4).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(first[step], expected, rtol=1e-12, atol=1e-14)
        optimizer.step()
    for ours, p in zip(first[5:], model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=1e-12, atol=1e-14)
