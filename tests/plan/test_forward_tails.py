"""A failure here is a parameter that is needed at another time than forward first uses it."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import make_profile

from lightning_mgwfbp.plan import (
    LayerProfile,
    ModelProfile,
    forward_split,
    forward_tails,
    with_forward_times,
)


def test_split_is_that_of_backward_unless_measured() -> None:
    """Seconds of forward are not shared out like backward's, or measured ones are not taken."""
    split = replace(make_profile([1, 3], [1, 1]), forward_seconds=2.0)
    assert forward_split(split) == [0.5, 1.5]
    instant = replace(make_profile([0, 0], [1, 1]), forward_seconds=2.0)
    assert forward_split(instant) == [1.0, 1.0]
    layers = tuple(LayerProfile(name, 1, "float32", 1.0, None, 0.25) for name in "ab")
    assert forward_split(ModelProfile("test", layers, 2.0)) == [0.25, 0.25]


def test_tails_unmeasured() -> None:
    """Forward does not go through the parameters in the reverse of backward's order."""
    profile = replace(make_profile([1, 3, 4], [1, 1, 1]), forward_seconds=4.0)
    assert forward_tails(profile).tolist() == [0.5, 2.0, 4.0]


def test_tails_in_the_measured_order() -> None:
    """The measured order of forward is not taken, or what is used at once has different tails."""
    indices, seconds = (2, 0, 1, 1), (1.0, 2.0, 0.0, 4.0)
    layers = tuple(
        LayerProfile(f"p{i}", 1, "float32", 1.0, None, seconds[i], index)
        for i, index in enumerate(indices)
    )
    assert forward_tails(ModelProfile("test", layers, 8.0)).tolist() == [1.0, 7.0, 5.0, 5.0]


@given(st.lists(st.integers(0, 8), min_size=1, max_size=8))
def test_measured_times_come_back_as_tails(uses: list[int]) -> None:
    """Measured first uses are written into the profile otherwise than they are read."""
    profile = make_profile([1] * len(uses), [1] * len(uses))
    measured = with_forward_times(profile, dict(zip(profile.names, uses, strict=True)), 8)
    assert forward_tails(measured).tolist() == [8 - use for use in uses]
    assert measured.forward_seconds == 8
    assert measured.names == profile.names


def test_unknown_and_late_uses() -> None:
    """A parameter of which nothing is known is not urgent, or a tail is negative."""
    measured = with_forward_times(make_profile([1, 1], [1, 1]), {"p0": 2.5}, 2.0)
    assert forward_tails(measured) == pytest.approx(np.array([0.0, 2.0]))
