"""A failure here is a plan that is shown otherwise than it is."""

from dataclasses import replace

import pytest

from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.plan import (
    AlphaBeta,
    DenseCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    simulate,
)
from lightning_mgwfbp.plan_table import print_plan

LAYERS = tuple(LayerProfile(f"p{index}", 1000, "float32", 0.001) for index in range(20))


def tuned(groups: int, wire_nbytes: int = 4000) -> Tuned:
    profile = ModelProfile("net", LAYERS[:groups], 0.0)
    plan = MergePlan(profile.names, tuple((i, i + 1) for i in range(groups)), "wfbp")
    link = AlphaBeta(1e-4, 8e-9)
    timeline = simulate(profile, plan, DenseCost(link))
    return Tuned(plan, profile, link, timeline, (wire_nbytes,) * groups)


def printed(what: Tuned, capsys: pytest.CaptureFixture[str]) -> str:
    print_plan(what)
    return capsys.readouterr().out


def test_a_dense_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """A column says of whole gradients that they travel whole, or a group is missing."""
    said = printed(tuned(2), capsys)
    assert "merge groups by planner 'wfbp': 2" in said
    assert said.count("4,000") == 2
    assert "wire" not in said
    assert "density" not in said


def test_what_travels_in_the_place_of_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    """A compressed plan looks as a dense one does."""
    said = printed(tuned(2, wire_nbytes=80), capsys)
    assert "wire bytes" in said
    assert said.count(" 80 ") == 2
    assert "density" not in said  # the plan has chosen nothing


def test_what_the_plan_chose(capsys: pytest.CaptureFixture[str]) -> None:
    """Groups that go whole under a compressor, or denser, do so without a word."""
    usual = tuned(4)
    plan = replace(usual.plan, densities=(1.0, None, 0.034, None))
    said = printed(replace(usual, plan=plan, wire_nbytes=(4000, 80, 272, 4000)), capsys)
    rows = [line for line in said.splitlines() if "4,000" in line]
    for row, word in zip(rows, ("whole", "as given", "0.034", "whole"), strict=True):
        assert f" {word} " in row


def test_many_groups(capsys: pytest.CaptureFixture[str]) -> None:
    """The first or the last groups are cut off, or a plan fills the screen."""
    rows = [line for line in printed(tuned(20), capsys).splitlines() if "4,000" in line]
    assert [int(row.split()[1]) for row in rows] == [*range(6), *range(14, 20)]
    rows = [line for line in printed(tuned(12), capsys).splitlines() if "4,000" in line]
    assert len(rows) == 12
