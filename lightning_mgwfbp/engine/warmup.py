"""The warm-up: watch the first training steps, then make the plan.

Driven from outside, by Lightning's callback or by the stand-alone optimizer wrapper. Meanwhile the
reducer exchanges gradients after backward, so communication does not inflate backward times.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_mgwfbp.engine import measured_costs, tuner
from lightning_mgwfbp.engine.options import Settings
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.exchange.decoupled import DecoupledExchanger
from lightning_mgwfbp.exchange.methods import kind_of
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.measure.backward import BackwardProfiler
from lightning_mgwfbp.measure.forward import ForwardProfiler
from lightning_mgwfbp.plan import (
    AlphaBeta,
    Cost,
    CrossTimeline,
    HalvesCost,
    MergePlan,
    ModelProfile,
    Timeline,
    simulate,
    simulate_cross_iteration,
)
from lightning_mgwfbp.plan.records import located


@dataclass(frozen=True)
class Tuned:
    """A plan, what it was made from, and what is expected of it.

    Attributes:
        wire_nbytes: of each merge group's message; a DDPCommHook is taken to send
            whole gradients.
    """

    plan: MergePlan
    profile: ModelProfile
    link: AlphaBeta
    timeline: Timeline | CrossTimeline
    wire_nbytes: tuple[int, ...]

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: counts, seconds, seconds per byte."""
        return {
            "mgwfbp/merge_groups": len(self.plan.groups),
            "mgwfbp/alpha_seconds": self.link.alpha,
            "mgwfbp/beta_seconds_per_byte": self.link.beta,
            "mgwfbp/predicted_communication_end_seconds": self.timeline.spans[-1].end_seconds,
            "mgwfbp/predicted_exposed_seconds": self.timeline.exposed_seconds,
        }


class WarmUp:
    """Profiles the first optimizer steps (the very first is not counted), plans, and installs.

    With a saved plan nothing is measured, with a saved profile no step is watched. It begins anew
    when parameters have joined or left the exchange.

    Args:
        model: its name, for the record.
        named_parameters: all parameters of the model.
        transport: joins the ranks.
        reducer: whose plan is to be made.
        settings: what the user chose.
        module: the one whose forward uses the parameters, if it is known.
    """

    def __init__(
        self,
        model: str,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        transport: Transport,
        reducer: Reducer,
        settings: Settings,
        module: nn.Module | None = None,
    ) -> None:
        self._model = model
        self._sample = next(iter(named_parameters))[1]
        self._transport = transport
        self._reducer = reducer
        self._settings = settings
        self._link = settings.link
        self._cost: Cost | None = None
        self._profiler: BackwardProfiler | None = None
        self._structure_version = reducer.known.version
        self._forward = None if module is None else ForwardProfiler(module, named_parameters)
        self._seen = 0  # steps since the warm-up, or the plan, began

    @property
    def running(self) -> bool:
        """Whether steps are being watched."""
        return self._profiler is not None

    def set_parameters(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Go on with other parameters: the model has been changed."""
        self._sample = named_parameters[0][1]
        if self._forward is not None:
            self._forward.set_parameters(named_parameters)

    def start(self) -> Tuned | None:
        """Install a saved plan, or plan by a saved profile, or begin to watch."""
        if isinstance(self._settings.planner, MergePlan):
            with located("`planner=...`"):
                self._reducer.install(self._settings.planner)
            self._warn_of_another_compressor(self._settings.planner)
        elif self._settings.profile is not None:
            with located("`profile=...`"):
                profile, carried = self._settings.profile, self._reducer.layout.carried
                profile.check_names(self._reducer.plan.names)
                profile.check_numels({name: tensor.numel() for name, tensor in carried.items()})
            return self._tune(self._settings.profile, busy_fraction=1.0)  # not known: likely
        else:
            self.restart()
        return None

    def _warn_of_another_compressor(self, plan: MergePlan) -> None:
        given = kind_of(self._settings.compressor)
        if plan.compressor not in ("", given) and self._transport.rank == 0:
            warnings.warn(
                f"`planner=...` is a plan that was made for {plan.compressor}, and is used with"
                f" {given}: other bytes travel than it was made for. It works, but a run"
                " without `planner` would measure a better one.",
                stacklevel=2,
            )

    def resume(self, plan: MergePlan) -> None:
        """Go on with the plan of the run that is resumed, unless another one was given or its
        parameters are others (some were frozen then)."""
        given = isinstance(self._settings.planner, MergePlan)
        if given or set(plan.names) != set(self._reducer.plan.names):
            return
        self.stop()
        self._reducer.install(plan)
        self._seen = 0

    def restart(self) -> None:
        """Begin to watch, whatever was given or measured before."""
        self.stop()
        self._reducer.hold()
        self._structure_version = self._reducer.known.version
        self._profiler = BackwardProfiler(self._sample)
        self._reducer.on_ready = self._profiler.mark
        if self._forward is not None:
            self._forward.forget()
        self._seen = 0

    def stop(self) -> None:
        """End without a plan; no hook stays."""
        if self._profiler is not None:
            self._profiler = self._reducer.on_ready = None
            if self._forward is not None:
                self._forward.drop()

    def forward_begins(self) -> None:
        if self._profiler is not None and self._forward is not None:
            self._forward.begin()

    def backward_begins(self) -> None:
        if self._profiler is None:
            return
        if self._forward is not None:
            self._forward.end()
        self._profiler.begin()

    def step_ended(self) -> Tuned | None:
        """Count an optimizer step; after the last one plan and install. Collective then."""
        self._seen += 1
        if self._profiler is None:
            if self._is_stale():
                self.restart()
            return None
        self._profiler.end()
        if self._seen == 1 < self._settings.warmup_steps:
            self._profiler.forget()
            if self._forward is not None:
                self._forward.forget()
        if self._seen < self._settings.warmup_steps:
            return None
        ready = self._profiler.ready_seconds()
        busy_fraction = self._profiler.busy_fraction()
        self.stop()
        profile = tuner.agree_on_profile(
            self._transport,
            self._reducer.layout.carried,
            ready,
            0.0 if self._forward is None else self._forward.forward_seconds(),
            {} if self._forward is None else self._forward.first_use_seconds(),
            self._model,
        )
        return self._tune(profile, busy_fraction)

    def _is_stale(self) -> bool:
        if isinstance(self._settings.planner, MergePlan):
            return False  # no planner to plan anew with: the reducer adapts the saved plan
        return (
            self._seen == self._settings.replan_every_n_steps
            or self._reducer.known.version != self._structure_version
        )

    def _tune(self, profile: ModelProfile, busy_fraction: float) -> Tuned:
        method = self._settings.compressor
        carried = list(self._reducer.layout.carried.values())
        if self._link is None or self._cost is None:
            self._link, self._cost = self._measured_cost(carried, busy_fraction)
        in_time = profile
        if self._reducer.exchanger.needs_whole_gradient:
            in_time = tuner.after_backward(profile)
        assert not isinstance(self._settings.planner, MergePlan)
        plan = tuner.agree_on_plan(
            self._transport, in_time, self._settings.planner, self._cost, method
        )
        self._reducer.install(plan)
        self._seen = 0
        return Tuned(
            plan,
            profile,
            self._link,
            _predict(in_time, plan, self._cost),
            tuner.wire_nbytes(profile, plan, self._cost, method),
        )

    def _measured_cost(self, carried: list[Tensor], busy_fraction: float) -> tuple[AlphaBeta, Cost]:
        method, given = self._settings.compressor, self._settings.link
        exchanger = self._reducer.exchanger
        if isinstance(exchanger, DecoupledExchanger):
            return measured_costs.halves_cost(
                self._transport, exchanger.halves, carried, method, given, busy_fraction
            )
        measured = (self._transport, carried, method)
        link = given or measured_costs.measure_link(*measured, busy_fraction).link
        return link, measured_costs.exchange_cost(
            *measured, link, busy_fraction, is_given=given is not None
        )


def _predict(profile: ModelProfile, plan: MergePlan, cost: Cost) -> Timeline | CrossTimeline:
    if isinstance(cost, HalvesCost):
        return simulate_cross_iteration(profile, plan, cost)
    return simulate(profile, plan, cost)
