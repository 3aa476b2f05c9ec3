"""The one recurrence: when each merge group is on the link, and how much of that is exposed.

Two clocks: backward makes gradient i at `ready_i`, whatever the link does; the link sends the merge
groups in order, each from `max(link free, ready of the group's last gradient)` on. Seconds since
backward began.
"""

from dataclasses import dataclass

from lightning_mgwfbp.plan.costs import Cost
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.profile import ModelProfile, Span


@dataclass(frozen=True)
class Timeline:
    """What a plan is predicted to do; all seconds count from the start of backward."""

    spans: tuple[Span, ...]
    """Each merge group's time on the link."""
    communication_end_seconds: float
    exposed_seconds: float
    """Communication after backward has ended: what the optimizer waits for."""
    lower_bound_seconds: float
    """An end of communication that no plan undercuts."""
    backward_seconds: float


def simulate(profile: ModelProfile, plan: MergePlan, cost: Cost) -> Timeline:
    """Predict the timeline of `plan`; ValueError if it lists other parameters than `profile`."""
    plan.check_names(profile.names)
    if plan.names != profile.names:
        raise ValueError("plan must list the parameters in the profile's order: plan again")
    ready = profile.ready_seconds
    offsets = cost.offsets(profile)
    starts, stops = map(list, zip(*plan.groups, strict=True))
    link_free = 0.0
    spans = []
    for index, seconds in enumerate(cost.communicate(offsets[stops] - offsets[starts])):
        begin = max(link_free, float(ready[stops[index] - 1]))
        link_free = begin + float(seconds)
        spans.append(Span("communicate", index, begin, link_free))
    return Timeline(
        spans=tuple(spans),
        communication_end_seconds=link_free,
        exposed_seconds=link_free - profile.backward_seconds,
        lower_bound_seconds=lower_bound_seconds(profile, cost),
        backward_seconds=profile.backward_seconds,
    )


def lower_bound_seconds(profile: ModelProfile, cost: Cost) -> float:
    """No plan ends earlier: the last gradient's group follows it, and all bytes follow the first.

    `max(r_last + min over groups that end with the last gradient, r_first + t(all bytes))`; for a
    cost that grows with size the cheapest such group is the last gradient alone.
    """
    ready = profile.ready_seconds
    offsets = cost.offsets(profile)
    last_group = float(cost.communicate(offsets[-1] - offsets[:-1]).min())
    everything = cost.least_seconds(float(offsets[-1]))
    return max(float(ready[-1]) + last_group, float(ready[0]) + everything)
