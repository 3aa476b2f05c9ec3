"""A failure here is when the warm-up watches, plans, or begins anew."""

import threading
from typing import Any

import pytest
from engine_examples import Layers, data_of, plan_of, reducer_of
from loopback import on_ranks

from lightning_mgwfbp.engine import measured_costs
from lightning_mgwfbp.engine.options import Options
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.engine.warmup import Tuned, WarmUp
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.measure import clocks
from lightning_mgwfbp.plan import AlphaBeta, DenseCost, MergePlan, ModelProfile, Optimal, simulate

LINK = AlphaBeta(1e-3, 1e-9)
NAMES = tuple(name for name, _ in Layers().named_parameters())


class Training:
    """A model, its reducer and its warm-up; `steps` drives them as the callback does."""

    def __init__(self, transport: LoopbackTransport, frozen: bool = False, **options: Any) -> None:
        self.rank = transport.rank
        self.model = Layers()
        self.model.layers[0].requires_grad_(not frozen)
        self.reducer: Reducer = reducer_of(self.model, transport)
        settings = Options(**{"link": LINK, **options}).settle(transport)
        named = list(self.model.named_parameters())
        self.warmup = WarmUp("Layers", named, transport, self.reducer, settings, self.model)

    def steps(self, count: int) -> list[Tuned | None]:
        return [self.step(seed) for seed in range(count)]

    def step(self, seed: int) -> Tuned | None:
        self.model.zero_grad()
        self.warmup.forward_begins()
        loss = self.model(data_of(self.rank, seed), (0, 1, 2))
        self.warmup.backward_begins()
        loss.backward()
        self.reducer.synchronize()
        return self.warmup.step_ended()


def alone(**options: Any) -> Training:
    return Training(LoopbackTransport.solo(), **options)


@pytest.mark.parametrize("warmup_steps", [1, 2, 5])
def test_it_plans_after_so_many_steps(warmup_steps: int) -> None:
    """The warm-up is a step too long or too short, or never ends."""
    training = alone(warmup_steps=warmup_steps)
    assert not training.warmup.running
    assert training.warmup.start() is None
    tuned = training.steps(warmup_steps + 3)
    assert [t is not None for t in tuned] == [i == warmup_steps - 1 for i in range(len(tuned))]
    assert not training.warmup.running


def test_after_the_warm_up_nothing_is_timed() -> None:
    """Every later step pays for the profiler, also when training ends within the warm-up."""
    training = alone(warmup_steps=2)
    assert training.reducer.on_ready is None
    training.warmup.start()
    assert training.reducer.on_ready is not None
    training.steps(2)
    assert training.reducer.on_ready is None
    training.warmup.restart()
    assert training.reducer.on_ready is not None
    training.warmup.stop()
    assert training.reducer.on_ready is None


def test_what_is_tuned_belongs_together() -> None:
    """Plan, profile, link and prediction are of different plans."""
    training = alone(warmup_steps=2, planner="optimal")
    training.warmup.start()
    tuned = training.steps(2)[1]
    assert tuned is not None
    cost = DenseCost(LINK, None)
    assert tuned.plan == Optimal().plan(tuned.profile, cost) == training.reducer.plan
    assert tuned.link == LINK
    assert tuned.timeline == simulate(tuned.profile, tuned.plan, cost)
    assert tuned.profile.model == "Layers"
    assert tuned.profile.forward_seconds > 0
    assert tuned.metrics()["mgwfbp/merge_groups"] == len(tuned.plan.groups)
    assert tuned.metrics()["mgwfbp/alpha_seconds"] == LINK.alpha


class Clock(threading.local):
    """In the place of the profiler's clock: each rank's own, and it runs only when told to."""

    now = 0.0

    def run(self, *_: object) -> None:
        self.now += 3.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(clocks, "now", lambda: clock.now)
    return clock


def test_the_first_step_is_not_counted(clock: Clock) -> None:
    """Cold caches and first allocations get into the profile."""
    for warmup_steps, seconds in ((2, 0.0), (1, 3.0)):  # a single step has to count
        training = alone(warmup_steps=warmup_steps)
        training.warmup.start()
        slow = training.model.layers[0].weight.register_hook(clock.run)
        tuned = training.step(0)
        slow.remove()
        tuned = tuned or training.step(1)
        assert tuned is not None
        assert tuned.profile.backward_seconds == seconds


def test_a_slow_rank_slows_every_ranks_profile_and_plans_are_equal(clock: Clock) -> None:
    """Ranks that measure different times plan by their own."""

    def tune(transport: LoopbackTransport) -> Tuned:
        training = Training(transport, warmup_steps=3)
        if transport.rank == 1:
            training.model.layers[1].weight.register_hook(clock.run)
        training.warmup.start()
        tuned = training.steps(3)[-1]
        assert tuned is not None
        assert training.reducer.plan == tuned.plan
        return tuned

    ours, theirs = on_ranks(tune)
    assert ours.profile == theirs.profile
    assert ours.plan == theirs.plan
    ready = dict(zip(ours.profile.names, ours.profile.ready_seconds, strict=True))
    assert ready["layers.2.weight"] == ready["layers.2.bias"] == 0
    assert ready["layers.1.weight"] == ready["layers.0.weight"] == 3


def test_the_link_is_timed_once_unless_given() -> None:
    """A given link is timed all the same, or each new plan times it again."""
    training = alone(warmup_steps=1, replan_every_n_steps=1, link=None)
    training.warmup.start()
    plans = [t for t in training.steps(5) if t is not None]
    assert len(plans) >= 2
    assert len({t.link for t in plans}) == 1
    assert plans[0].link != LINK


def measured_profile() -> ModelProfile:
    training = alone(warmup_steps=1)
    training.warmup.start()
    tuned = training.step(0)
    assert tuned is not None
    return tuned.profile


def test_a_saved_profile_and_link_plan_at_once() -> None:
    """What was measured before is measured again."""
    profile = measured_profile()
    training = alone(profile=profile)
    tuned = training.warmup.start()
    assert tuned is not None
    assert tuned.profile == profile
    assert tuned.plan == training.reducer.plan == Optimal().plan(profile, DenseCost(LINK, None))
    assert not training.warmup.running
    assert training.steps(3) == [None] * 3


def test_a_saved_plan_is_installed_at_once() -> None:
    """A saved plan is replaced by a measured one."""
    plan = plan_of(Layers(), 1, 4, 1)
    training = alone(planner=plan)
    assert training.warmup.start() is None
    assert training.reducer.plan == plan
    assert training.steps(3) == [None] * 3
    assert training.reducer.plan == plan


def test_a_plan_made_for_another_compressor_is_warned_about() -> None:
    """Groups that fit whole gradients are taken for a compressed training, without a word."""

    def planned(compressor: str | None) -> MergePlan:
        training = alone(compressor=compressor, warmup_steps=1)
        training.warmup.start()
        tuned = training.step(0)
        assert tuned is not None
        return MergePlan.from_json(tuned.plan.to_json(), "a file")

    with pytest.warns(UserWarning, match="made for no compressor, and is used with Cast: "):
        alone(planner=planned(None), compressor="bf16").warmup.start()
    with pytest.warns(UserWarning, match="made for Cast, and is used with no compressor: "):
        alone(planner=planned("bf16")).warmup.start()
    alone(planner=planned("bf16"), compressor="fp16").warmup.start()  # of as many bytes
    alone(planner=plan_of(Layers(), 1, 4, 1), compressor="bf16").warmup.start()  # made by hand


@pytest.mark.parametrize("argument", ["planner", "profile"])
def test_a_record_of_another_model_is_refused(argument: str) -> None:
    """A foreign record is half applied instead of refused, or the parameter is not named."""
    record: object = MergePlan(("layers.0.weight", "stranger"), ((0, 2),))
    if argument == "profile":
        profile = measured_profile()
        layers = tuple(layer for layer in profile.layers if "1.bias" not in layer.name)
        record = ModelProfile("other", layers, 0.0)
    with pytest.raises(ValueError, match=r"lacks the parameter 'layers\.[12]\.bias'"):
        alone(**{argument: record}).warmup.start()


def test_it_begins_anew_as_often_as_asked() -> None:
    """Re-planning comes too often, or only once."""
    training = alone(warmup_steps=2, replan_every_n_steps=3)
    training.warmup.start()
    tuned = training.steps(12)
    # two steps watched, three by the plan, and so on
    assert [i for i, t in enumerate(tuned) if t is not None] == [1, 6, 11]


def unfreeze(training: Training) -> list[Tuned | None]:
    """A step with a frozen layer, then four with all."""
    training.warmup.start()
    training.step(0)
    training.model.layers[0].requires_grad_(True)
    return training.steps(4)


def test_it_begins_anew_when_parameters_join() -> None:
    """Parameters that joined are never measured, and stay in groups of their own."""
    training = alone(warmup_steps=1, frozen=True)
    tuned = unfreeze(training)
    # one step in which the parameters join, then one that is watched
    assert [t is not None for t in tuned] == [False, True, False, False]
    assert tuned[1] is not None
    assert set(tuned[1].plan.names) == set(NAMES)


def test_a_saved_plan_is_only_adapted_when_parameters_join() -> None:
    """Unfreezing a backbone under a saved plan ends the training with an error."""
    training = alone(planner=MergePlan(NAMES[:1:-1], ((0, 1), (1, 4))), warmup_steps=1, frozen=True)
    unfreeze(training)
    assert training.reducer.plan.names == NAMES[:1:-1] + NAMES[1::-1]


def test_a_resumed_plan_wins_over_that_of_a_saved_profile() -> None:
    """A resumed run goes on by another plan than it was stopped with."""
    profile, saved = measured_profile(), plan_of(Layers(), 1, 4, 1)
    training = alone(profile=profile, planner="single")
    training.warmup.start()
    assert training.reducer.plan.groups != saved.groups
    training.warmup.resume(saved)
    assert training.reducer.plan == saved
    assert not training.warmup.running


@pytest.mark.parametrize("begun", [False, True])
def test_a_resumed_plan_spares_the_warm_up(begun: bool) -> None:
    """A resumed run measures anew, and goes on by another plan than it was stopped with."""
    plan = plan_of(Layers(), 1, 4, 1)
    training = alone(warmup_steps=2, replan_every_n_steps=3)
    training.warmup.start()
    if begun:
        training.step(9)
    training.warmup.resume(plan)
    assert training.reducer.plan == plan
    assert not training.warmup.running
    assert training.reducer.on_ready is None
    # three steps by that plan, then two that are watched
    assert [t is not None for t in training.steps(5)] == [False] * 4 + [True]


def test_what_is_no_plan_for_this_run_is_not_resumed() -> None:
    """The plan of a checkpoint replaces the user's, or is taken for a model it does not fit."""
    given, saved = plan_of(Layers(), 6), plan_of(Layers(), 1, 4, 1)
    training = alone(planner=given)
    training.warmup.start()
    training.warmup.resume(saved)
    assert training.reducer.plan == given
    training = alone()
    training.warmup.start()
    training.warmup.resume(MergePlan(NAMES[1:], ((0, 5),)))
    assert training.warmup.running


def test_a_compressor_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new plan times link and compressor again, seconds each time."""
    timed = []
    exchange_cost = measured_costs.exchange_cost
    monkeypatch.setattr(
        measured_costs, "exchange_cost", lambda *a, **o: timed.append(1) or exchange_cost(*a, **o)
    )
    training = alone(warmup_steps=1, replan_every_n_steps=1, compressor="topk")
    training.warmup.start()
    plans = [t for t in training.steps(5) if t is not None]
    assert len(plans) >= 2
    assert len(timed) == 1
