"""The one recurrence: when each merge group is selected and on the link, and how much is exposed.

Two clocks. On the compute stream backward makes gradient i at `ready_i`, later by all selections
before; when a group's last gradient exists the group is selected there. The link sends the groups
in order, each from `max(link free, end of its selection)` on. A dense group takes no time to
select, and then backward waits for nothing. Seconds since backward began.
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
    """Communication after backward and all selections: what the optimizer waits for."""
    lower_bound_seconds: float
    """An end of communication that no plan undercuts."""
    backward_seconds: float
    """Backward alone, as measured."""
    selections: tuple[Span, ...] = ()
    """Time on the compute stream, of the merge groups that take any; `index` is the group's."""


def simulate(profile: ModelProfile, plan: MergePlan, cost: Cost) -> Timeline:
    """Predict the timeline of `plan`; ValueError if it lists other parameters than `profile`."""
    plan.check_names(profile.names)
    if plan.names != profile.names:
        raise ValueError("plan must list the parameters in the profile's order: plan again")
    sizes = cost.group_sizes(profile, plan.groups)
    seconds = zip(cost.select(sizes).tolist(), cost.communicate(sizes).tolist(), strict=True)
    readies = profile.ready_seconds.tolist()
    selected = link_free = 0.0
    spans, selections = [], []
    for index, (select, communicate) in enumerate(seconds):
        ready = readies[plan.groups[index][1] - 1]
        selectable, selected = ready + selected, selected + select
        begin = max(link_free, ready + selected)
        link_free = begin + communicate
        spans.append(Span("communicate", index, begin, link_free))
        if select > 0:
            selections.append(Span("select", index, selectable, ready + selected))
    return Timeline(
        spans=tuple(spans),
        communication_end_seconds=link_free,
        exposed_seconds=link_free - (readies[-1] + selected),
        lower_bound_seconds=lower_bound_seconds(profile, cost),
        backward_seconds=profile.backward_seconds,
        selections=tuple(selections),
    )


def lower_bound_seconds(profile: ModelProfile, cost: Cost) -> float:
    """No plan ends earlier: the last gradient's group follows it, and all bytes follow the first.

    `max(r_last + min over groups that end with the last gradient, r_first + t(all bytes))`. Such a
    group is selected and then sent, and neither begins before its last gradient exists, which
    selections before can only delay. For a cost that grows with size the cheapest such group is
    the last gradient alone.
    """
    ready = profile.ready_seconds
    offsets = cost.offsets(profile)
    sizes = offsets[-1] - offsets[:-1]
    last_group = float((cost.select(sizes) + cost.communicate(sizes)).min())
    everything = cost.least_seconds(offsets[-1])
    return max(float(ready[-1]) + last_group, float(ready[0]) + everything)
