"""A failure here is `RandomK` drawing other positions on some rank, or some elements too seldom."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_mgwfbp.exchange.compressors import Moment, RandomK


def test_random_positions_depend_on_seed_step_and_size_alone() -> None:
    """Ranks draw different positions, or the same ones in every step."""
    drawn = RandomK(0.1, seed=1).positions(1000, Moment(2, 0.1))
    assert torch.equal(drawn, RandomK(0.5, seed=1).positions(1000, Moment(2, 0.1)))
    for other in (
        RandomK(0.1, seed=2).positions(1000, Moment(2, 0.1)),
        RandomK(0.1, seed=1).positions(1000, Moment(3, 0.1)),
        RandomK(0.1, seed=1).positions(2000, Moment(2, 0.05)) // 2,
    ):
        assert (other - drawn).abs().median() > 2


@given(numel=st.integers(1, 3000), step=st.integers(0, 9), density=st.floats(0.001, 1))
def test_random_positions_are_distinct(numel: int, step: int, density: float) -> None:
    """An element is sent twice, or from beyond the end."""
    positions = RandomK(0.1).positions(numel, Moment(step, density))
    assert positions.unique().numel() == len(positions)
    assert 0 <= positions.min() <= positions.max() < numel


@pytest.mark.parametrize(("numel", "k"), [(10, 3), (7, 1), (64, 48)])
def test_every_element_is_as_likely_as_any_other(numel: int, k: int) -> None:
    """Elements that are never sent, or seldom."""
    steps = 4000
    drawn = [RandomK(0.1).positions(numel, Moment(step, k / numel)) for step in range(steps)]
    counts = torch.cat(drawn).bincount(minlength=numel)
    chance = k / numel
    deviation = math.sqrt(steps * chance * (1 - chance))
    assert (counts - steps * chance).abs().max() < 5 * deviation


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"density": value}, r"density=\.\.\.\)` must be in \(0, 1\], got ")
        for value in (0, -0.5, 1.5, math.nan, True, "auto", None)
    ),
    *(({"seed": value}, r"seed=\.\.\.\)` must be a whole number") for value in (-1, 0.5, True)),
    *(
        ({"dense_below_numel": value}, r"dense_below_numel=\.\.\.\)` must be a whole number")
        for value in (-1, 1.5, True)
    ),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], expected: str) -> None:
    """A typing error trains with other numbers than the user thinks, or fails far away."""
    with pytest.raises(ValueError, match=rf"`RandomK\({expected}"):
        RandomK(**{"density": 0.1, **options})
