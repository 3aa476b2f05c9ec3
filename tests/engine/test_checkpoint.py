"""A failure here is a resumed training that goes on otherwise than one that was not stopped."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from loopback import on_ranks, same_bits
from network_examples import batch, each, merged_of, network
from torch import Tensor

from lightning_mgwfbp.engine.checkpoint import ExchangeState
from lightning_mgwfbp.exchange.transport import LoopbackTransport


class Run:
    """One rank's training, that can be saved and resumed."""

    def __init__(
        self, transport: LoopbackTransport, compressor: str, saved: bytes | None = None
    ) -> None:
        self.rank = transport.rank
        self.model = network()
        self.merged = merged_of(self.model, transport, compressor)
        self.steps = 0
        if saved is not None:
            state = torch.load(io.BytesIO(saved), weights_only=True)
            self.model.load_state_dict(state["model"])
            self.merged.load_state_dict(state["optimizer"])
            self.merged.load_exchange_state_dict(state["exchange"])
            self.steps = state["steps"]

    def train(self, steps: int) -> Run:
        for _ in range(steps):
            self.merged.zero_grad()
            self.model(batch(self.rank, self.steps)).square().mean().backward()
            self.merged.step()
            self.steps += 1
        return self

    def save(self) -> bytes | None:
        """Collective; the file is rank 0's."""
        exchange = self.merged.exchange_state_dict()
        assert (exchange is None) == (self.rank != 0)
        file = io.BytesIO()
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.merged.state_dict(),
                "exchange": exchange,
                "steps": self.steps,
            },
            file,
        )
        return None if self.rank else file.getvalue()

    @property
    def weights(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters()]

    @property
    def left(self) -> dict[str, Any]:
        return self.merged.reducer.exchanger.state_dict()


def saved_after(compressor: str, steps: int, world_size: int = 2) -> tuple[bytes, list[Any]]:
    """The file, and every rank's rests."""

    def save(transport: LoopbackTransport) -> Any:
        run = Run(transport, compressor).train(steps)
        return run.save(), run.left

    ranks = on_ranks(save, world_size=world_size)
    return ranks[0][0], [left for _, left in ranks]


@each
def test_resumed_is_as_if_it_had_not_stopped(compressor: str) -> None:
    """Rests, the step of random draws, or the plan, by which groups are compressed together."""

    def whole(transport: LoopbackTransport) -> Any:
        run = Run(transport, compressor).train(5)
        saved = run.save()
        plan = run.merged.plan
        run.train(4)
        return run.weights, saved, plan

    ranks = on_ranks(whole)
    saved = ranks[0][1]

    def resume(transport: LoopbackTransport) -> Any:
        run = Run(transport, compressor, saved)
        plan = run.merged.plan
        run.train(4)
        assert run.merged.plan == plan
        return run.weights, plan

    for (weights, _, plan), (ours, resumed_plan) in zip(ranks, on_ranks(resume), strict=True):
        assert plan is not None
        assert resumed_plan == plan  # at once: no step is watched
        assert all(map(same_bits, ours, weights))


@each
def test_every_rank_gets_its_own(compressor: str) -> None:
    """All ranks take over one rank's rests."""
    saved, left = saved_after(compressor, 4)

    def resume(transport: LoopbackTransport) -> Any:
        return Run(transport, compressor, saved).left

    for ours, theirs in zip(on_ranks(resume), left, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["step"] == theirs["step"] == 4
        for kind in ours.keys() - {"step"}:
            assert any(left.any() for left in theirs[kind].values())
            for n in ours[kind].keys() | theirs[kind].keys():  # what is missing is zeros
                there = [left[kind][n] for left in (ours, theirs) if n in left[kind]]
                assert same_bits(there[0], there[1] if there[1:] else torch.zeros_like(there[0]))


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
@each
def test_another_number_of_ranks(compressor: str, before: int, after: int) -> None:
    """The ranks owe together more, or less, than before."""
    saved, left = saved_after(compressor, 4, world_size=before)

    def resume(transport: LoopbackTransport) -> Any:
        run = Run(transport, compressor, saved)
        resumed = run.left
        assert run.merged.plan is None  # it was made for another number
        run.train(1)
        return resumed

    resumed = on_ranks(resume, world_size=after)
    for kind in ("residual", "velocity"):
        for n in left[0].get(kind, ()):
            mean = torch.stack([rank[kind][n] for rank in left]).mean(0)
            again = torch.stack([rank[kind][n] for rank in resumed]).mean(0)
            torch.testing.assert_close(again, mean)


def test_nothing_is_saved_where_nothing_is_left_behind() -> None:
    """A dense training's checkpoint grows."""

    def save(transport: LoopbackTransport) -> Any:
        return Run(transport, "dense").train(3).merged.exchange_state_dict()

    assert on_ranks(save) == [None, None]


def test_before_there_is_a_plan() -> None:
    """A checkpoint from within the warm-up ends it, or cannot be read."""
    saved, _ = saved_after("topk", 1)

    def resume(transport: LoopbackTransport) -> list[bool]:
        run = Run(transport, "topk", saved)
        return [run.train(1).merged.plan is not None for _ in range(3)]

    assert on_ranks(resume) == [[False, True, True]] * 2


def test_a_plan_that_was_given_wins() -> None:
    """A saved plan that the user gives for the resumed run is replaced by the checkpoint's."""
    saved, _ = saved_after("topk", 3)
    exchange = torch.load(io.BytesIO(saved), weights_only=True)["exchange"]
    run = Run(LoopbackTransport.solo(), "topk").train(2)
    given = run.merged.plan
    assert given is not None
    single = type(given)(given.names, ((0, len(given.names)),))
    model = network()
    merged = merged_of(model, LoopbackTransport.solo(), "topk", plan=single)
    merged.load_exchange_state_dict(exchange)
    assert merged.plan == single


def test_a_rest_of_another_shape_is_named() -> None:
    """A checkpoint of another model is broadcast into this one's rests."""
    saved, _ = saved_after("topk", 3)
    exchange = torch.load(io.BytesIO(saved), weights_only=True)["exchange"]
    for rank in exchange["exchanger"]:
        rank["residual"]["2.weight"] = torch.ones(16, 1)
    run = Run(LoopbackTransport.solo(), "topk")
    with pytest.raises(ValueError, match=r"\[0\]: the residual of '2\.weight' has shape \(16, 1\)"):
        run.merged.load_exchange_state_dict(exchange)


def test_a_plan_that_cannot_be_read_is_named() -> None:
    """A damaged checkpoint ends in an error about something else."""
    saved, _ = saved_after("topk", 3, world_size=1)
    exchange = torch.load(io.BytesIO(saved), weights_only=True)["exchange"]
    run = Run(LoopbackTransport.solo(), "topk")
    with pytest.raises(ValueError, match=r"^checkpoint\['mgwfbp'\]: plan: lacks"):
        run.merged.load_exchange_state_dict({**exchange, "plan": "{}"})


def test_tensors_travel_one_at_a_time() -> None:
    """Every rank needs memory for the rests of all, or rank 0 for a copy of them."""

    def save(transport: LoopbackTransport) -> int:
        run = Run(transport, "topk").train(3)
        most = 0
        gather, all_gather = transport.gather_object, transport.all_gather_object

        def counting(value: Tensor, root: int, *, key: str) -> Any:
            nonlocal most
            most = max(most, value.numel())
            return gather(value, root, key=key)

        def names(value: list[str], *, key: str) -> list[list[str]]:
            assert all(isinstance(name, str) for name in value)
            return all_gather(value, key=key)

        transport.gather_object = counting  # type: ignore[assignment,method-assign]
        transport.all_gather_object = names  # type: ignore[assignment,method-assign]
        run.merged.exchange_state_dict()
        return most

    assert on_ranks(save) == [16 * 16] * 2


def test_what_only_one_rank_has_left() -> None:
    """A rank that has sent everything gets another one's, or saving waits for it for ever."""

    def gather(transport: LoopbackTransport) -> Any:
        left = {"weight": torch.ones(2)} if transport.rank == 1 else {}
        state = ExchangeState({"step": 3, "residual": left}, None, [], {})
        return state.gathered(transport)

    saved, nothing, also_nothing = on_ranks(gather, world_size=3)
    assert nothing is also_nothing is None
    first, second, third = saved["exchanger"]
    assert first == third == {"step": 3, "residual": {}}
    assert second["step"] == 3
    assert second["residual"]["weight"].tolist() == [1, 1]
