"""A failure here is `TopK` sending other elements than the largest, or as many as was not asked."""

import math
from typing import Any

import pytest
import torch

from lightning_mgwfbp.exchange.compressors import Moment, TopK, top_k


@pytest.mark.parametrize(("numel", "density", "k"), [(250, 0.01, 2), (350, 0.01, 4), (9, 0.01, 1)])
def test_k_is_rounded_and_at_least_one(numel: int, density: float, k: int) -> None:
    """Another k than planners and the published algorithm have."""
    values, indices = TopK().encode(torch.randn(numel), Moment(density=density))
    assert len(values) == len(indices) == k


def test_top_k_sends_the_largest_and_sets_them_to_zero() -> None:
    """The values of other positions, or a velocity that goes on with what was sent."""
    buffer = torch.tensor([0.1, -5.0, 0.0, 3.0, -0.2])
    moment = Moment(density=0.4)
    wire = TopK().encode(buffer, moment)
    assert sorted(zip(wire[1].tolist(), wire[0].tolist(), strict=True)) == [(1, -5.0), (3, 3.0)]
    velocity = torch.arange(1.0, 6.0)
    TopK().mask(velocity, wire, moment)
    assert velocity.tolist() == [1.0, 0.0, 3.0, 0.0, 5.0]


def test_indices_are_as_narrow_as_they_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the bytes, or positions that wrap around."""
    monkeypatch.setattr(top_k, "MOST_INT32_INDEXED", 9)
    assert TopK().encode(torch.ones(9), Moment())[1].dtype == torch.int32
    monkeypatch.setattr(top_k, "MOST_INT32_INDEXED", 8)
    assert TopK().encode(torch.ones(9), Moment())[1].dtype == torch.int64


def test_auto_density_keeps_its_floor_until_somebody_chooses() -> None:
    """More travels than the user's floor before the plan has chosen, or none at all."""
    assert TopK(density="auto").density_at(epoch=3, step=9) == 0.001
    assert TopK(density="auto", density_floor=0.02).density_at(epoch=3, step=9) == 0.02


def test_a_floor_without_auto_is_said_to_have_no_effect() -> None:
    """An option is taken without a word and then not used."""
    with pytest.warns(UserWarning, match=r"`TopK\(density_floor=0.01\)` has no effect") as warned:
        TopK(density=0.1, density_floor=0.01)
    assert warned[0].filename == __file__


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        ({"density": value}, r"density=\.\.\.\)` must be in \(0, 1\] or 'auto', got .*\. It is")
        for value in (0, -0.5, 1.5, math.nan, True, "all", None)
    ),
    (
        {"density": "auto", "density_schedule": [0.5]},
        r"density='auto'\)` .*: leave one out",
    ),
    (
        {"density": "auto", "density_floor": 0},
        r"density_floor=\.\.\.\)` must be in \(0, 1\], got 0",
    ),
    ({"selection": "quick"}, r"selection=\.\.\.\)` .*'auto', 'exact', 'sampled'.*, got 'quick'"),
    *(
        ({"momentum_correction": value}, r"momentum_correction=\.\.\.\)` must be in \[0, 1\)")
        for value in (-0.1, 1, math.nan)
    ),
    *(
        ({"local_clip_norm": value}, r"local_clip_norm=\.\.\.\)` must be a finite number above 0")
        for value in (0, -1.0, math.inf, math.nan)
    ),
    *(
        ({"dense_below_numel": value}, r"dense_below_numel=\.\.\.\)` must be a whole number")
        for value in (-1, 1.5, True)
    ),
]


@pytest.mark.parametrize(("options", "expected"), REFUSED)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], expected: str) -> None:
    """A typing error trains with other numbers than the user thinks, or fails far away."""
    with pytest.raises(ValueError, match=rf"`TopK\({expected}"):
        TopK(**options)
