"""The plan as a short table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.plan import CrossTimeline, Timeline

_MOST_ROWS = 12


def print_plan(tuned: Tuned) -> None:
    """Print one row for each merge group (the first and the last where there are many)."""
    plan, timeline = tuned.plan, tuned.timeline
    table = Table(
        title=f"merge groups by planner {plan.planner!r}: {len(plan.groups)}",
        caption=f"alpha {tuned.link.alpha * 1e6:.0f} us, beta {tuned.link.beta * 1e9:.3f} ns per"
        f" byte; backward ends at {timeline.backward_seconds * 1e3:.1f} ms, "
        + _prediction(timeline),
    )
    for heading in ("group", "tensors", "bytes", "ready (ms)", "sent (ms)"):
        table.add_column(heading, justify="right")
    ready, nbytes = tuned.profile.ready_seconds, tuned.profile.nbytes
    sent = {span.index: span.end_seconds for span in timeline.spans}  # the last of each counts
    for index, (start, stop) in enumerate(plan.groups):
        if _MOST_ROWS // 2 <= index < len(plan.groups) - _MOST_ROWS // 2:
            if index == _MOST_ROWS // 2:
                table.add_row("...")
            continue
        table.add_row(
            str(index),
            str(stop - start),
            f"{int(nbytes[start:stop].sum()):,}",
            f"{ready[stop - 1] * 1e3:.1f}",
            f"{sent[index] * 1e3:.1f}",
        )
    Console().print(table)


def _prediction(timeline: Timeline | CrossTimeline) -> str:
    exposed = f"predicted exposed communication {timeline.exposed_seconds * 1e3:.1f} ms"
    if isinstance(timeline, Timeline):
        return exposed
    return (
        f"the next forward at {timeline.iteration_seconds * 1e3:.1f} ms, with no plan sooner than"
        f" at {timeline.lower_bound_seconds * 1e3:.1f}; {exposed}"
    )
