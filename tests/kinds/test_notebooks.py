"""A failure here means: training in a notebook, whose processes are forked, does not work."""

from __future__ import annotations

import sys

import pytest
from processes import PROGRAMS, run

pytestmark = pytest.mark.slow

# a prompt is how Lightning knows an interactive interpreter
_CELLS = f"""
import sys
sys.ps1 = "In [1]: "
sys.path.insert(0, {str(PROGRAMS)!r})
import lightning.pytorch as pl
import fit
pl.seed_everything(1, verbose=False)
model = fit.Line()
for _ in range(2):
    fit.report(fit.fit(model, {{"trainer": {{"strategy": sys.argv[1]}}}}), model)
"""


def _totals(strategy: str) -> list[str]:
    ended = run([sys.executable, "-c", _CELLS, strategy])
    assert ended.code == 0, ended.output[-3000:]
    assert not ended.orphans
    return [line.split()[-1] for line in ended.output.splitlines() if line.startswith("RESULT")]


def test_a_cell_that_is_run_twice() -> None:
    """Weights do not come back to the notebook, or a second fit finds the first one's remains."""
    totals = _totals("mgwfbp_notebook")
    assert len(totals) == 2
    assert totals == _totals("ddp_notebook")
