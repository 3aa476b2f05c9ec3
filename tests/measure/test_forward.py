"""A failure here is a first use in forward that is another's, or hooks that disturb training."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from lightning_mgwfbp.measure import clocks
from lightning_mgwfbp.measure.forward import ForwardProfiler


class Scale(nn.Module):
    """x * weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Model(nn.Module):
    """Called in the order c, a, c again; b is used without its module, d not at all.

    The last module shares its weight with the first.
    """

    def __init__(self) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.tensor(v)) for v in (2.0, 3.0, 5.0, 7.0)]
        self.a, self.b, self.c, self.d = map(Scale, weights)
        self.tied = Scale(self.c.weight)

    def forward(self) -> Tensor:
        x = self.a(self.c(torch.tensor(1.0))) * self.b.weight
        return self.tied(x)


def on_clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """The profiler's clock reads `times`, one after the other."""
    left: Iterator[float] = iter(times)
    monkeypatch.setattr(clocks, "now", lambda: next(left))


def profiler_of(model: nn.Module) -> ForwardProfiler:
    return ForwardProfiler(model, model.named_parameters())


def run(profiler: ForwardProfiler, model: nn.Module) -> Tensor:
    profiler.begin()
    loss = model()
    profiler.end()
    return loss


def test_medians_of_first_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong statistic, a use that is not the first, or one made up of what was never seen."""
    steps = (0, 1, 2, 7, 9), (10, 12, 14, 18, 19), (20, 22, 26, 28, 40)
    on_clock(monkeypatch, *(time for step in steps for time in step))
    model = Model()
    profiler = profiler_of(model)
    for _ in steps:
        run(profiler, model)
    expected = [("b.weight", 0), ("d.weight", 0), ("c.weight", 2), ("a.weight", 4)]
    assert list(profiler.first_use_seconds().items()) == expected
    assert profiler.forward_seconds() == 9


def test_real_times_are_in_the_order_of_forward() -> None:
    """The same on the real clock: modules are called in another order than they are listed."""
    model = Model()
    profiler = profiler_of(model)
    for _ in range(3):
        run(profiler, model)
    uses = profiler.first_use_seconds()
    assert 0 < uses["c.weight"] < uses["a.weight"] < profiler.forward_seconds()


def test_only_between_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call in validation counts, or what a checkpoint computes again in backward."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Scale(nn.Parameter(torch.tensor(2.0)))

        def forward(self) -> Tensor:
            return checkpoint(self.a, torch.tensor(1.0), use_reentrant=False)

    on_clock(monkeypatch, 0, 1, 4)  # more readings would raise
    model = Checkpointed()
    profiler = profiler_of(model)
    run(profiler, model).backward()
    model()
    assert profiler.first_use_seconds() == {"a.weight": 1}
    assert profiler.forward_seconds() == 4


def test_a_forward_that_raises_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a forward counts as one."""
    on_clock(monkeypatch, 0, 10, 11, 13, 15, 19)
    model = Model()
    profiler = profiler_of(model)
    profiler.begin()
    run(profiler, model)
    assert profiler.first_use_seconds()["c.weight"] == 1
    assert profiler.forward_seconds() == 9


def test_forget_drops_what_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold first step is counted."""
    on_clock(monkeypatch, 0, 90, 91, 92, 93, 100, 101, 102, 103, 104)
    model = Model()
    profiler = profiler_of(model)
    run(profiler, model)
    profiler.forget()
    assert profiler.first_use_seconds() == dict.fromkeys(dict(model.named_parameters()), 0.0)
    assert profiler.forward_seconds() == 0
    run(profiler, model)
    assert profiler.forward_seconds() == 4


@pytest.mark.parametrize("end", [ForwardProfiler.end, ForwardProfiler.drop])
def test_a_hook_only_within_a_forward(end: Callable[[ForwardProfiler], None]) -> None:
    """Steps after the warm-up are slowed down, or the measurement is lost."""
    before = dict(torch_module._global_forward_pre_hooks)
    model = Model()
    profiler = profiler_of(model)
    run(profiler, model)
    first = profiler.first_use_seconds()
    profiler.begin()
    profiler.begin()
    assert len(torch_module._global_forward_pre_hooks) == len(before) + 1
    assert not any(module._forward_pre_hooks for module in model.modules())
    end(profiler)
    assert torch_module._global_forward_pre_hooks == before
    assert profiler.first_use_seconds()["c.weight"] == first["c.weight"]


def test_compiled_modules_meet_no_hook() -> None:
    """torch.compile warns of it, traces it, and compiles anew when it is gone."""
    model = torch.compile(Model(), backend="eager")
    profiler = profiler_of(model)
    run(profiler, model)
    assert not any(profiler.first_use_seconds().values())
    assert profiler.forward_seconds() > 0


def test_only_what_is_named_is_watched() -> None:
    """Parameters outside the exchange get times, or lose those inside theirs."""
    model = Model()
    profiler = ForwardProfiler(model, [("mine", model.c.weight)])
    run(profiler, model)
    assert list(profiler.first_use_seconds()) == ["mine"]
    assert profiler.first_use_seconds()["mine"] > 0


def test_the_loss_is_that_of_plain_training() -> None:
    """The profiler changes what it watches."""
    model = Model()
    plain = model()
    assert torch.equal(run(profiler_of(model), model), plain)
