"""A failure here is in `lightning-mgwfbp plan`: its arguments, its output, or its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mgwfbp.cli import main
from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    Cost,
    DenseCost,
    HalvesCost,
    LayerProfile,
    ModelProfile,
    SortSelection,
    SparseCost,
    Threshold,
    TopKPairs,
    plan_cross_iteration,
    simulate,
    simulate_cross_iteration,
)

PROFILE = Path(__file__).parent / "data" / "profiles" / "resnet50.json"
LINK = ("--alpha", "1e-4", "--beta", "8e-9")
GATHER = ("--world-size", "4", "--gather-alpha", "1e-4", "--gather-beta", "8e-9")
SPARSE = ("--density", "0.01", "--select", "1e-9", *GATHER)
DENSE_COST = DenseCost(AlphaBeta(1e-4, 8e-9))
SPARSE_COST = SparseCost(AlphaBeta(3 * 1e-4, 3 * 8e-9), SortSelection(1e-9), TopKPairs(0.01))


def run(*arguments: str) -> None:
    assert main(["plan", *map(str, arguments)]) in (None, 0)


@pytest.mark.parametrize(("link", "cost"), [(LINK, DENSE_COST), (SPARSE, SPARSE_COST)])
def test_json_holds_what_the_simulator_says(
    link: tuple[str, ...], cost: Cost, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys, names or numbers of the JSON output differ from the planners' and the simulator's."""
    run(str(PROFILE), *link, "--planner", "all", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == list(PLANNERS)
    profile = ModelProfile.load(PROFILE)
    for name, planner in PLANNERS.items():
        plan = planner.plan(profile, cost)
        timeline = simulate(profile, plan, cost)
        assert printed[name] == {
            "groups": [list(group) for group in plan.groups],
            "communication_end_seconds": timeline.communication_end_seconds,
            "exposed_seconds": timeline.exposed_seconds,
            "lower_bound_seconds": timeline.lower_bound_seconds,
        }


def test_cross_iteration_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The other schedule's numbers are not those of its planner, or what it gains is not shown."""
    run(str(PROFILE), *LINK, "--planner", "all", "--schedule", "cross_iteration", "--json")
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [*list(PLANNERS)[:-1], "cross_iteration"]
    profile, cost = ModelProfile.load(PROFILE), HalvesCost.of_all_reduce(DENSE_COST.link)
    for fields, planner in zip(printed.values(), PLANNERS.values(), strict=True):
        plan = plan_cross_iteration(profile, cost, planner)
        timeline = simulate_cross_iteration(profile, plan, cost)
        whole = simulate(profile, planner.plan(profile, DENSE_COST), DENSE_COST)
        assert fields == {
            "groups": [list(group) for group in plan.groups],
            "pieces": list(plan.pieces),
            "gather_order": list(plan.gather_order),
            "iteration_seconds": timeline.iteration_seconds,
            "exposed_seconds": timeline.exposed_seconds,
            "lower_bound_seconds": timeline.lower_bound_seconds,
            "backward_schedule_seconds": whole.communication_end_seconds + profile.forward_seconds,
        }


def test_auto_is_the_default_and_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """The default is not the exact planner under its own name."""
    run(str(PROFILE), *LINK, "--json")
    assert list(json.loads(capsys.readouterr().out)) == ["optimal"]


def test_sparse_values_keep_their_own_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sixteen bits are costed as more, or the published formula is another."""
    profile = ModelProfile("half", (LayerProfile("p", 1024, "float16", 0.5),), 0.0)
    profile.save(tmp_path / "half.json")
    run(str(tmp_path / "half.json"), *SPARSE, "--json")
    printed = json.loads(capsys.readouterr().out)["optimal"]
    gather = 3 * (1e-4 + 8e-9 * (2 + 4) * 10)
    assert printed["communication_end_seconds"] == pytest.approx(0.5 + 1e-9 * 10_240 + gather)
    assert printed["exposed_seconds"] == pytest.approx(gather)


def test_threshold_nbytes(capsys: pytest.CaptureFixture[str]) -> None:
    """The threshold does not reach its planner, or has no effect without a word."""
    run(str(PROFILE), *LINK, "--planner", "threshold", "--threshold-nbytes", "1000000", "--json")
    profile, cost = ModelProfile.load(PROFILE), DenseCost(AlphaBeta(1e-4, 8e-9))
    expected = [list(group) for group in Threshold(1_000_000).plan(profile, cost).groups]
    printed = capsys.readouterr()
    assert json.loads(printed.out)["threshold"]["groups"] == expected
    assert printed.err == ""
    run(str(PROFILE), *LINK, "--planner", "wfbp", "--threshold-nbytes", "5", "--json")
    assert "--threshold-nbytes has no effect" in capsys.readouterr().err


def test_cross_iteration_table_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Columns of the other schedule are cut off, or its planner is called by another name."""
    run(str(PROFILE), *LINK, "--planner", "all", "--schedule", "cross_iteration")
    printed = capsys.readouterr().out
    columns = ["planner", "groups", "iteration", "exposed", "lower_bound", "backward_schedule"]
    assert printed.splitlines()[1].split() == columns
    assert "\ncross_iteration: [0, " in printed


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table does not show every planner's groups."""
    run(str(PROFILE), *LINK, "--planner", "all")
    printed = capsys.readouterr().out
    assert all(f"\n{name}: [0, " in printed for name in PLANNERS)
    assert "single: [0, 161)" in printed


def test_one_gradient_is_no_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 gradients."""
    layer = LayerProfile("p", 1, "int8", 0.5)
    ModelProfile("tiny", (layer,), 0.0).save(tmp_path / "tiny.json")
    run(str(tmp_path / "tiny.json"), *LINK)
    assert capsys.readouterr().out.startswith("tiny: 1 gradient, 1 byte, backward")


@pytest.mark.slow
def test_a_reader_that_has_enough() -> None:
    """A pipe that `head` closes ends in a traceback."""
    command = [sys.executable, "-m", "lightning_mgwfbp", "plan", str(PROFILE), *LINK, "--json"]
    plan = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert plan.stdout is not None
    plan.stdout.close()
    _, said = plan.communicate(timeout=60)
    assert (plan.returncode, said) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((PROFILE, *LINK, "--planner", "fastest"), "'fastest'"),
        ((PROFILE, "--alpha=-1", "--beta", "0"), "alpha must be"),
        ((PROFILE, "--alpha", "0", "--beta", "nan"), "beta must be"),
        ((PROFILE, "--alpha", "soon", "--beta", "0"), "--alpha"),
        ((PROFILE, "--beta", "0"), "--alpha"),
        ((PROFILE, *LINK, "--planner", "threshold", "--threshold-nbytes=-1"), "nbytes"),
        ((PROFILE,), "required without --density: --alpha, --beta"),
        ((PROFILE, "--density", "0.1"), "--select, --world-size, --gather-alpha, --gather-beta"),
        ((PROFILE, *GATHER, "--select", "0"), "of a sparse exchange: --density"),
        (
            (PROFILE, *LINK, *SPARSE),
            "--alpha, --beta would have no effect with --density: leave them",
        ),
        ((PROFILE, "--beta", "0", *SPARSE), "--beta would have no effect with --density: leave it"),
        ((PROFILE, *SPARSE, "--density", "0"), "--density must be in (0, 1]"),
        ((PROFILE, *SPARSE, "--density", "nan"), "--density must be in (0, 1]"),
        ((PROFILE, *SPARSE, "--select=-1"), "--select must be"),
        (
            (PROFILE, *SPARSE, "--select", "1e300"),
            "--select must be at most 1e+15 seconds, got 1e+",
        ),
        ((PROFILE, "--alpha", "1e300", "--beta", "0"), "alpha must be at most 1e+15 seconds"),
        ((PROFILE, "--alpha", "0", "--beta", "1e300"), "beta must be at most 1e+15 seconds per"),
        (
            (PROFILE, *SPARSE, "--world-size", "1"),
            "--world-size must be a whole number, at least 2",
        ),
        ((PROFILE, *SPARSE, "--world-size", "9" * 400), "--world-size must be at most"),
        ((PROFILE, *SPARSE, "--gather-alpha", "inf"), "--gather-alpha must be"),
        ((PROFILE, *SPARSE, "--gather-beta=-1e-9"), "--gather-beta must be"),
        ((PROFILE, "--schedule", "cross_iteration"), "required with --schedule cross_iteration"),
        ((PROFILE, *SPARSE, "--schedule", "cross_iteration"), "--density, --select, --world-size"),
        ((PROFILE, *SPARSE, "--schedule", "cross_iteration"), "whole: leave them out"),
        ((PROFILE, *LINK, "--schedule", "later"), "--schedule"),
        (("missing.json",), "no file missing.json; give the profile.json that a training saves"),
        ((__file__, *LINK), "test_cli_plan.py: not JSON"),
    ],
)
def test_bad_input(
    arguments: tuple[object, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input ends otherwise than with code 2 and one line that names it."""
    with pytest.raises(SystemExit) as exit_info:
        run(*arguments)  # type: ignore[arg-type]
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
