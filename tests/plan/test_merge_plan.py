"""A failure here is a plan that is no partition, or that is read or written wrongly."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_mgwfbp.plan import MergePlan

PLAN = MergePlan(("c", "b", "a"), ((0, 1), (1, 3)), "mgwfbp")
FIELDS = {"format": 1, "planner": "mgwfbp", "names": ["c", "b", "a"], "groups": [[0, 1], [1, 3]]}


def test_file(tmp_path: Path) -> None:
    """A saved plan is not the plan that was saved."""
    PLAN.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == FIELDS
    assert MergePlan.load(tmp_path / "plan.json") == PLAN


def test_densities_file(tmp_path: Path) -> None:
    """Densities are lost, or None among them."""
    plan = replace(PLAN, densities=(1.0, None))
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == {**FIELDS, "densities": [1.0, None]}
    assert MergePlan.load(tmp_path / "plan.json") == plan


def test_halves_file(tmp_path: Path) -> None:
    """Pieces or orders of an exchange in halves are lost."""
    plan = replace(PLAN, pieces=(1, 3), gather_order=(1, 0, 1, 1))
    plan.save(tmp_path / "plan.json")
    fields = json.loads((tmp_path / "plan.json").read_text())
    assert fields == {**FIELDS, "pieces": [1, 3], "gather_order": [1, 0, 1, 1]}
    assert MergePlan.load(tmp_path / "plan.json") == plan


def test_a_file_says_what_the_plan_was_made_for(tmp_path: Path) -> None:
    """The compressor is lost, or makes another plan of one with the same groups."""
    plan = replace(PLAN, compressor="TopK")
    plan.save(tmp_path / "plan.json")
    assert MergePlan.load(tmp_path / "plan.json").compressor == "TopK"
    assert plan == PLAN


@pytest.mark.parametrize(
    ("pieces", "gather_order", "said"),
    [
        ((1, 3), (), "gather_order must be given too"),
        ((), (1, 0), "pieces must be given too"),
        ((1,), (1, 0), "pieces must be one for each of the 2 groups, got 1"),
        ((1, 3, 1), (1, 0), "pieces must be one for each of the 2 groups, got 3"),
        ((1, 0), (1, 0), r"pieces\[1\] must be a whole number, at least 1, got 0"),
        ((1, 3), (0,), "gather_order must name group 1 once for each of its 3 pieces, got it 0"),
        ((1, 1), (0, 0), "gather_order must name group 0 once for each of its 1 pieces, got it 2"),
        ((1, 1), (2, 0, 1), "gather_order must name group 2 once for each of its 0 pieces"),
        ((1, 3), (0, -1), r"gather_order\[1\] must be a whole number, at least 0, got -1"),
    ],
)
def test_wrong_halves(pieces: tuple[int, ...], gather_order: tuple[int, ...], said: str) -> None:
    """A group without messages or without a place in the order, or one with two, is accepted."""
    with pytest.raises(ValueError, match=f"^{said}"):
        replace(PLAN, pieces=pieces, gather_order=gather_order)


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    """Writing is not atomic: the target or a partial file is touched although writing failed."""
    target = tmp_path / "plan.json"
    target.mkdir()
    with pytest.raises(OSError, match=r"plan\.json"):
        PLAN.save(target)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    "groups",
    [
        (),
        ((0, 2),),
        ((0, 4),),
        ((1, 3),),
        ((0, 1), (2, 3)),
        ((0, 2), (1, 3)),
        ((0, 0), (0, 3)),
        ((1, 3), (0, 1)),
    ],
)
def test_no_partition(groups: tuple[tuple[int, int], ...]) -> None:
    """Groups with a gap, an overlap, an empty group or another order are accepted."""
    with pytest.raises(ValueError, match=r"^groups must"):
        MergePlan(("c", "b", "a"), groups)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "1"),
        ("planner", 1),
        ("names", "cba"),
        ("names", []),
        ("names", ["c", "b", "b"]),
        ("names", ["c", "b", ["a"]]),
        ("groups", 3),
        ("groups", [[0, 3, 3]]),
        ("groups", ["03"]),
        ("groups", [[0, 3.0]]),
        ("groups", [[False, 3]]),
        ("groups", [[0, 2]]),
        ("densities", 0.5),
        ("densities", None),
        ("densities", [1.0]),
        ("densities", [0.5, 0]),
        ("densities", [0.5, 1.5]),
        ("densities", [0.5, True]),
        ("densities", [0.5, "1"]),
        ("pieces", 1),
        ("pieces", None),
        ("pieces", [1]),
        ("pieces", [1, 0]),
        ("pieces", [1, 1.0]),
        ("pieces", [1, True]),
        ("gather_order", "10"),
        ("gather_order", None),
        ("gather_order", [0]),
        ("gather_order", [1, 1]),
        ("gather_order", [1, 2]),
        ("gather_order", [1, 0.0]),
        ("gather_order", [True, False]),
        ("compressor", None),
        ("compressor", ["TopK"]),
    ],
)
def test_wrong_file(field: str, value: object) -> None:
    """A wrong value is accepted, or the error does not name file and field."""
    halves = {"pieces": [1, 1], "gather_order": [1, 0]}
    with pytest.raises(ValueError, match=rf"^p\.json: '?{field}"):
        MergePlan.from_json(json.dumps({**FIELDS, **halves, field: value}), "p.json")


@pytest.mark.parametrize("field", FIELDS)
def test_missing_field(field: str) -> None:
    """A key that is not there is not named."""
    fields = {key: value for key, value in FIELDS.items() if key != field}
    with pytest.raises(ValueError, match=rf"^p\.json: lacks the key '{field}'"):
        MergePlan.from_json(json.dumps(fields), "p.json")


def test_check_names() -> None:
    """A plan of another model passes, or the error names no parameter."""
    PLAN.check_names(["a", "b", "c"])
    with pytest.raises(ValueError, match="the merge plan lacks the parameter 'd'"):
        PLAN.check_names(["a", "b", "c", "d"])
    with pytest.raises(ValueError, match="the merge plan has a foreign parameter 'c'"):
        PLAN.check_names(["a", "b"])
