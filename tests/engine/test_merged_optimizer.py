"""A failure here is the wrapper: when it averages, or what it hides of the user's optimizer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_examples import Layers, backward, data_of, gradients, merge
from loopback import on_ranks
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.transport import LoopbackTransport


@pytest.mark.parametrize("around", ["wrapper", "wrapped"])
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: StepLR(o, step_size=2, gamma=0.1),
        lambda o: OneCycleLR(o, max_lr=0.5, total_steps=9),
        lambda o: ReduceLROnPlateau(o, patience=0, factor=0.5),
    ],
    ids=["StepLR", "OneCycleLR", "ReduceLROnPlateau"],
)
def test_schedulers_may_hold_either(scheduler: Callable[..., Any], around: str) -> None:
    """A learning rate is set on the wrapper and never reaches the update, or a warning is due."""

    def rates(optimizer: Optimizer, held: Optimizer, model: Layers) -> list[float]:
        schedule = scheduler(held)
        seen = []
        for step in range(5):
            optimizer.zero_grad()
            backward(model, data_of(step))
            optimizer.step()
            schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))
            seen.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        return seen

    ours, theirs = Layers(), Layers()
    plain = SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    merged = merge(ours, lr=0.1, momentum=0.9)
    held = merged if around == "wrapper" else merged.optimizer
    assert rates(merged, held, ours) == rates(plain, plain, theirs)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))


def test_it_is_an_optimizer_whose_state_is_the_wrapped_ones() -> None:
    """Checkpoints of the wrapper cannot be loaded without it, or the other way round."""
    model = Layers()
    merged = merge(model, optimizer=Adam, lr=0.1)
    assert isinstance(merged, Optimizer)
    backward(model, data_of(0))
    merged.step()
    assert merged.state is merged.optimizer.state
    assert merged.param_groups is merged.optimizer.param_groups
    assert merged.defaults is merged.optimizer.defaults
    saved = merged.state_dict()
    assert saved.keys() == {"state", "param_groups"}
    alone = Adam(Layers().parameters(), lr=0.5)
    alone.load_state_dict(saved)
    again = merge(Layers(), optimizer=Adam, lr=0.5)
    again.load_state_dict(alone.state_dict())
    assert again.param_groups[0]["lr"] == 0.1
    assert float(again.state[again.param_groups[0]["params"][0]]["step"]) == 1


def test_step_hooks_fire_once_a_step() -> None:
    """Profilers and EMA that hook the optimizer's step are not called, or twice."""
    model = Layers()
    merged = merge(model, lr=0.1)
    calls: list[str] = []
    merged.register_step_pre_hook(lambda *_: calls.append("pre"))
    merged.register_step_post_hook(lambda *_: calls.append("post"))
    backward(model, data_of(0))
    merged.step()
    assert calls == ["pre", "post"]


def test_zero_grad_is_the_wrapped_ones() -> None:
    """zero_grad on the wrapper leaves gradients, or ignores set_to_none."""
    model = Layers()
    merged = merge(model, lr=0.1)
    backward(model, data_of(0))
    merged.zero_grad(set_to_none=False)
    assert all(g is not None and not g.any() for g in gradients(model).values())
    merged.zero_grad()
    assert set(gradients(model).values()) == {None}


def test_param_groups_may_be_added_but_only_of_named_parameters() -> None:
    """Parameters that no reducer knows are stepped on local gradients, and ranks diverge."""
    model = Layers()
    first, *others = model.parameters()
    merged = MergedOptimizer(
        SGD([first], lr=0.1), model.named_parameters(), transport=LoopbackTransport.solo()
    )
    merged.add_param_group({"params": others, "lr": 0.2})
    assert len(merged.optimizer.param_groups) == 2
    with pytest.raises(ValueError, match="named_parameters"):
        merged.add_param_group({"params": nn.Parameter(torch.zeros(1))})
    assert len(merged.optimizer.param_groups) == 2
    with pytest.raises(ValueError, match="named_parameters"):
        MergedOptimizer(
            SGD(model.parameters(), lr=0.1),
            [("first", first)],
            transport=LoopbackTransport.solo(),
        )


def test_ranks_with_different_options_are_told_so() -> None:
    """Ranks with different options wait for each other for ever."""

    def make(transport: LoopbackTransport) -> str:
        model = Layers()
        with pytest.raises(RuntimeError, match="ranks disagree") as error:
            MergedOptimizer(
                SGD(model.parameters()),
                model.named_parameters(),
                transport=transport,
                warmup_steps=2 + transport.rank,
            )
        return str(error.value)

    ours, theirs = on_ranks(make)
    assert ours == theirs
    assert "warmup_steps is 2 on rank 0 and 3 on rank 1" in ours


def test_plan_is_none_during_the_warm_up_and_close_ends_it() -> None:
    """A provisional plan passes for a measured one, or hooks outlive the wrapper."""
    model = Layers()
    merged = merge(model, lr=0.1)
    assert merged.plan is None
    merged.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    merged = merge(model, lr=0.1)
    for step in range(2):
        assert merged.plan is None
        backward(model, data_of(step))
        merged.step()
    assert merged.plan is not None
    merged.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
