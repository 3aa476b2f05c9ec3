"""A failure here is a damaged file that is taken for right, or whose error names nothing."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from damage import damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mgwfbp.plan import (
    PLANNERS,
    AlphaBeta,
    DenseCost,
    HalvesCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    plan_cross_iteration,
    simulate,
    simulate_cross_iteration,
)
from lightning_mgwfbp.plan.records import Saved

LAYERS = (
    LayerProfile("head.bias", 3, "bfloat16", 0.5, (3,), 0.25, 1),
    LayerProfile("head.weight", 6, "complex64", 0.25, (2, 3), 0.5, 0),
    LayerProfile("stem.weight", 4, "float32", 0.125),
)
NAMES = tuple(layer.name for layer in LAYERS)
RECORDS: dict[str, Saved] = {
    "profile": ModelProfile("net", LAYERS, 0.75, "measured"),
    "plan": MergePlan(NAMES, ((0, 1), (1, 3)), "mgwfbp", (1.0, None), (1, 3), (1, 0, 1, 1)),
    "link": AlphaBeta(1e-3, 1e-9),
}
each = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def read(record: Saved, text: str) -> Saved | None:
    """What `text` is read as; None where it is refused by an error that names the file."""
    try:
        return type(record).from_json(text, "given.json")
    except ValueError as error:
        said = str(error)
    assert said.startswith("given.json: ")
    assert len(said) < 400
    said.encode()  # may be printed anywhere
    return None


def use(record: Saved) -> None:
    """A record that was read comes back as it was, and planning by it ends, in finite numbers."""
    assert type(record).from_json(record.to_json(), "again.json") == record
    if isinstance(record, AlphaBeta):
        assert np.isfinite(record([0, 2**53])).all()
    if isinstance(record, ModelProfile):
        for planner in PLANNERS.values():
            timeline = simulate(
                record,
                planner.plan(record, DenseCost(AlphaBeta(1.0, 1e9))),
                DenseCost(AlphaBeta(1, 1)),
            )
            assert np.isfinite(timeline.communication_end_seconds)
        assert (record.nbytes >= 0).all()
        assert record.nbytes.sum() >= 0


@each
@settings(deadline=None)
@given(st.data())
def test_a_part_is_another(record: Saved, data: st.DataObject) -> None:
    """A wrong type, a number out of range, a name that is doubled or missing is let through."""
    document = data.draw(damaged(json.loads(record.to_json())))
    got = read(record, json.dumps(document))
    if got is not None:
        use(got)


@each
@settings(deadline=None)
@given(st.data())
def test_bytes_are_others(record: Saved, data: st.DataObject) -> None:
    """A flipped or lost byte leads to another error than one that names the file."""
    content = bytearray(record.to_json().encode())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= data.draw(st.integers(1, 255))
    else:
        del content[at : at + data.draw(st.integers(1, 40))]
    got = read(record, content.decode(errors="replace"))
    if got is not None:
        use(got)


@each
def test_cut_short(record: Saved) -> None:
    """A file that was not written to its end is read, at any length."""
    text = record.to_json().strip()
    assert [read(record, text[:length]) for length in range(len(text))] == [None] * len(text)


@each
def test_no_file_of_text(record: Saved, tmp_path: Path) -> None:
    """A directory, a loop, nothing, or bytes are another error than one that names the path."""
    paths = [tmp_path / name for name in ("folder", "loop", "missing", "binary", "nul", "empty")]
    folder, loop, _, binary, nul, empty = paths
    folder.mkdir()
    loop.symlink_to(loop)
    binary.write_bytes(os.urandom(64) + b"\xff")
    nul.write_bytes(bytes(64))
    empty.write_bytes(b"")
    for path in [*paths, empty / "within a file"]:
        with pytest.raises((OSError, ValueError), match=path.name):
            type(record).load(path)


class Executes:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@each
def test_nothing_is_executed(record: Saved, tmp_path: Path) -> None:
    """A pickle in the place of JSON is loaded."""
    path, marker = tmp_path / "given.json", tmp_path / "executed"
    path.write_bytes(pickle.dumps(Executes(marker), protocol=0))
    with pytest.raises(ValueError, match=r"given\.json: not JSON"):
        type(record).load(path)
    assert not marker.exists()
    pickle.loads(path.read_bytes())
    assert marker.exists()  # it would have


def test_the_largest_numbers_that_are_let_through() -> None:
    """Sums or products of numbers within their limits are infinite, or never end."""
    for numel in (2**52, 2**53 - 9):
        layers = [LayerProfile("a", numel, "float32", 1e15), LayerProfile("b", 9, "int8", 1e15)]
        profile = ModelProfile("vast", tuple(layers), 1e15)
        use(profile)
        link = AlphaBeta(1e15, 1e15)
        plan = PLANNERS["optimal"].plan(profile, DenseCost(link))
        assert np.isfinite(simulate(profile, plan, DenseCost(link)).communication_end_seconds)
    with pytest.raises(ValueError, match=r"numel of all layers must be at most 9,007,199,254,740,"):
        ModelProfile("more", (LayerProfile("a", 2**53, "int8", 0), layers[1]), 0)


@pytest.mark.slow
def test_the_largest_gradient_in_pieces() -> None:
    """The same of deferred steps, in whose plan a gradient travels in very many pieces."""
    halves = HalvesCost.of_all_reduce(AlphaBeta(1e15, 1e15))
    profile = ModelProfile("large", (LayerProfile("a", 2**36, "float32", 1e15),), 1e15)
    plan = plan_cross_iteration(profile, halves, PLANNERS["optimal"])
    assert np.isfinite(simulate_cross_iteration(profile, plan, halves).iteration_seconds)


def test_another_models() -> None:
    """A profile whose sizes are not the model's leads to a plan by wrong sizes."""
    profile = RECORDS["profile"]
    assert isinstance(profile, ModelProfile)
    right = {"head.bias": 3, "head.weight": 6, "stem.weight": 4}
    profile.check_numels(right)
    with pytest.raises(ValueError, match=r"has 6 elements of 'head\.weight', the model 7; it was"):
        profile.check_numels({**right, "head.weight": 7})
    sparse = ModelProfile("net", (LayerProfile("head.bias", 0, "float32", 0.5),), 0.75)
    sparse.check_numels(right)
