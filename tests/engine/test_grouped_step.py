"""A failure here means: a part of a step has other options, or other parameters, than the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from lightning_mgwfbp.engine.grouped_step import GroupedStep, is_step_watched, why_not_in_parts


def parameters(count: int = 3) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.ones(2)) for _ in range(count)]
    for p in made:
        p.grad = torch.ones(2)
    return made


def test_options_are_those_of_the_capture() -> None:
    """A scheduler, or whoever adds a group, reaches into a step that was taken before."""
    first, second, late = parameters()
    lr = torch.tensor(0.5)
    optimizer = optim.SGD([{"params": [first]}, {"params": [second]}], lr=lr)
    step = GroupedStep(optimizer)
    step.capture()
    lr.fill_(7.0)
    optimizer.param_groups[1]["lr"] = 9.0
    optimizer.add_param_group({"params": [late]})
    groups = optimizer.param_groups
    step.step_on([second, late])
    assert first.tolist() == [1.0, 1.0]
    assert second.tolist() == [0.5, 0.5]
    assert late.tolist() == [1.0, 1.0]
    step.step_on([first])
    assert first.tolist() == [0.5, 0.5]
    assert optimizer.param_groups is groups
    assert [len(group["params"]) for group in groups] == [1, 1, 1]
    assert groups[1]["lr"] == 9.0


def test_a_part_is_outside_of_the_forward_it_comes_in() -> None:
    """State in a narrow dtype, or steps that are recorded for backward."""
    (first,) = parameters(1)
    optimizer = optim.Adam([first])
    step = GroupedStep(optimizer)
    step.capture()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu"):
            step.step_on([first])
    finally:
        torch.set_default_dtype(torch.float32)
    kept = optimizer.state[first]
    assert kept["exp_avg"].dtype == kept["step"].dtype == torch.float32
    assert not kept["exp_avg"].requires_grad


def test_an_empty_part_and_an_empty_group() -> None:
    """A param_group without parameters has no device."""
    (first,) = parameters(1)
    step = GroupedStep(optim.SGD([{"params": []}, {"params": [first]}], lr=0.5))
    step.capture()
    step.step_on([])
    step.step_on([first])
    assert first.tolist() == [0.5, 0.5]


class OwnStep(optim.SGD):
    def step(self, closure: Any = None) -> None:
        return None


def test_what_cannot_be_in_parts() -> None:
    """A step that is not torch's own, or whose graph is wanted."""
    assert why_not_in_parts(optim.SGD(parameters())) is None
    assert "differentiable=True" in str(
        why_not_in_parts(optim.Adam(parameters(), differentiable=True))
    )
    for optimizer in (OwnStep(parameters()), optim.LBFGS(parameters())):
        assert "is not known to update each" in str(why_not_in_parts(optimizer))


def test_who_watches_steps() -> None:
    """Hooks and patched steps are called for each part, or a scheduler is taken for one."""
    optimizer = optim.SGD(parameters(), lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert not is_step_watched(optimizer)
    hook = optimizer.register_step_post_hook(lambda *_: None)
    assert is_step_watched(optimizer)
    hook.remove()
    step = optimizer.step
    optimizer.step = lambda *_: step()  # type: ignore[method-assign]
    assert is_step_watched(optimizer)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "ASGD", "Rprop", "Adafactor"])
def test_parts_make_the_whole(kind: str) -> None:
    """An update that looks at more than one parameter."""
    ours, theirs = parameters(4), parameters(4)
    whole = getattr(optim, kind)(theirs, lr=0.1)
    step = GroupedStep(getattr(optim, kind)(ours, lr=0.1))
    for _ in range(3):
        whole.step()
        step.capture()
        for part in ((3, 1), (0,), (2,)):
            step.step_on([ours[i] for i in part])
    assert all(map(torch.equal, ours, theirs))
