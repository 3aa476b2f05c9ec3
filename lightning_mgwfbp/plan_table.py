"""The plan as a short table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.plan import CrossTimeline, Timeline

_MOST_ROWS = 12


def print_plan(tuned: Tuned) -> None:
    """Print one row for each merge group (the first and the last where there are many).

    Under a compressor also the bytes of each message, and the density of each group where
    the plan has chosen any.
    """
    plan, timeline = tuned.plan, tuned.timeline
    table = Table(
        title=f"merge groups by planner {plan.planner!r}: {len(plan.groups)}",
        caption=f"{tuned.link}; backward ends at"
        f" {timeline.backward_seconds * 1e3:.1f} ms, {_prediction(timeline)}",
    )
    columns = _columns(tuned)
    for heading in columns:
        table.add_column(heading, justify="right")
    rows = list(zip(*columns.values(), strict=True))
    if len(rows) > _MOST_ROWS:
        rows[_MOST_ROWS // 2 : -(_MOST_ROWS // 2)] = [("...",)]
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _columns(tuned: Tuned) -> dict[str, list[str]]:
    """The cells below each heading, one for each merge group."""
    plan, ready = tuned.plan, tuned.profile.ready_seconds
    nbytes = [int(tuned.profile.nbytes[start:stop].sum()) for start, stop in plan.groups]
    sent = {span.index: span.end_seconds for span in tuned.timeline.spans}  # the last of each
    columns = {
        "group": [str(index) for index in range(len(plan.groups))],
        "tensors": [str(stop - start) for start, stop in plan.groups],
        "bytes": [f"{each:,}" for each in nbytes],
    }
    if plan.densities or list(tuned.wire_nbytes) != nbytes:
        columns["wire bytes"] = [f"{each:,}" for each in tuned.wire_nbytes]
    if plan.densities:
        columns["density"] = [
            _shown(density, sends_less=wire < whole)
            for density, wire, whole in zip(plan.densities, tuned.wire_nbytes, nbytes, strict=True)
        ]
    columns["ready (ms)"] = [f"{ready[stop - 1] * 1e3:.1f}" for _, stop in plan.groups]
    columns["sent (ms)"] = [f"{sent[index] * 1e3:.1f}" for index in range(len(plan.groups))]
    return columns


def _shown(density: float | None, *, sends_less: bool) -> str:
    if density is None:
        return "as given" if sends_less else "whole"  # of parameters too small to be compressed
    return "whole" if density == 1 else f"{density:.2g}"


def _prediction(timeline: Timeline | CrossTimeline) -> str:
    exposed = f"predicted exposed communication {timeline.exposed_seconds * 1e3:.1f} ms"
    if isinstance(timeline, Timeline):
        return exposed
    return (
        f"the next forward at {timeline.iteration_seconds * 1e3:.1f} ms, with no plan sooner than"
        f" at {timeline.lower_bound_seconds * 1e3:.1f}; {exposed}"
    )
