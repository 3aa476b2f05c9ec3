"""The plan as a short table for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from lightning_mgwfbp.engine.warmup import Tuned

_MOST_ROWS = 12


def print_plan(tuned: Tuned) -> None:
    """Print one row for each merge group (the first and the last where there are many)."""
    plan, timeline = tuned.plan, tuned.timeline
    table = Table(
        title=f"merge groups by planner {plan.planner!r}: {len(plan.groups)}",
        caption=(
            f"alpha {tuned.link.alpha * 1e6:.0f} us, beta {tuned.link.beta * 1e9:.3f} ns per byte;"
            f" backward ends at {timeline.backward_seconds * 1e3:.1f} ms,"
            f" predicted exposed communication {timeline.exposed_seconds * 1e3:.1f} ms"
        ),
    )
    for heading in ("group", "tensors", "bytes", "ready (ms)", "sent (ms)"):
        table.add_column(heading, justify="right")
    ready, nbytes = tuned.profile.ready_seconds, tuned.profile.nbytes
    for index, ((start, stop), span) in enumerate(zip(plan.groups, timeline.spans, strict=True)):
        if _MOST_ROWS // 2 <= index < len(plan.groups) - _MOST_ROWS // 2:
            if index == _MOST_ROWS // 2:
                table.add_row("...")
            continue
        table.add_row(
            str(index),
            str(stop - start),
            f"{int(nbytes[start:stop].sum()):,}",
            f"{ready[stop - 1] * 1e3:.1f}",
            f"{span.end_seconds * 1e3:.1f}",
        )
    Console().print(table)
