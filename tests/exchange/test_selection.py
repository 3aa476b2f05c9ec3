"""A failure here is a selection that misses large magnitudes, or takes the slow way unseen."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_mgwfbp.exchange.compressors import selection
from lightning_mgwfbp.exchange.compressors.selection import SELECTIONS, exact_top_k, sampled_top_k

NUMEL = 300_007  # more than one chunk, and no multiple of eight


def normal(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1), dtype=dtype)


def with_scales(*scales: float) -> Tensor:
    """Blocks of different scale, as the layers of a merge group are."""
    blocks = normal().chunk(len(scales))
    return torch.cat([s * block for s, block in zip(scales, blocks, strict=True)])


def every(stride: int, values: Tensor) -> Tensor:
    """Zeros but for one in `stride`."""
    return torch.where(torch.arange(NUMEL) % stride == 0, values, 0.0)


def with_not_finite() -> Tensor:
    values = normal()
    values[::1000] = math.nan
    values[5::1001] = -math.inf
    return values


# What a sample must not be misled by.
KINDS: dict[str, Callable[[], Tensor]] = {
    "normal": normal,
    "float64": lambda: normal(torch.float64),
    "heavy tails": lambda: normal() ** 3,
    "layers": lambda: with_scales(1e-8, 1e-2, 1e3, 1.0, 1e-5),
    "one large layer of many": lambda: with_scales(*[1e-4] * 40, 1.0),
    "mostly zeros": lambda: every(20, normal()),
    "almost all zeros": lambda: every(2000, normal()),
    "zeros": lambda: torch.zeros(NUMEL),
    "equal": lambda: torch.full((NUMEL,), -0.5),
    "periodic": lambda: torch.sin(torch.arange(NUMEL) * (math.pi / 128)),
    "ones at the end": lambda: (torch.arange(NUMEL) >= 270_000).to(torch.float32),
    "one in 64": lambda: every(64, torch.ones(NUMEL)),
    "sorted": lambda: normal().sort().values,
    "not finite": with_not_finite,
}


def magnitudes_at(buffer: Tensor, positions: Tensor) -> Tensor:
    """Ascending, NaN last."""
    return buffer.abs()[positions].sort().values


@pytest.mark.parametrize("k", [1, 300, 3001])
@pytest.mark.parametrize("kind", KINDS)
def test_the_sample_finds_the_top_k(kind: str, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data for which the threshold is too high or too low: less is sent than could be, or all
    must be sorted (`exact_top_k` is gone here)."""
    buffer = KINDS[kind]()
    best = magnitudes_at(buffer, exact_top_k(buffer, k))
    monkeypatch.setattr(selection, "exact_top_k", None)
    positions = sampled_top_k(buffer, k)
    assert positions.unique().numel() == len(positions) == k
    torch.testing.assert_close(
        magnitudes_at(buffer, positions), best, rtol=0, atol=0, equal_nan=True
    )


def test_the_threshold_lets_enough_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The margin for a sample that is not like the whole: without it, half of all would sort."""
    monkeypatch.setattr(selection, "exact_top_k", None)
    for numel in range(50_000, 60_000, 500):
        k = numel // 100
        positions = sampled_top_k(torch.arange(numel) + 1.0, k)
        assert positions.tolist() == list(range(numel - k, numel))


def test_what_a_sample_does_not_serve_is_sorted() -> None:
    """The way out for high densities and narrow dtypes."""
    unseen = torch.zeros(NUMEL)
    unseen[12345] = 1.0  # by the sample
    cases = [(unseen, NUMEL), (normal(), NUMEL - 1), (normal().bfloat16(), 300)]
    for buffer, k in cases:
        positions = sampled_top_k(buffer, k)
        assert positions.unique().numel() == len(positions) == k
        expected = magnitudes_at(buffer, exact_top_k(buffer, k))
        assert torch.equal(magnitudes_at(buffer, positions), expected)


def test_a_threshold_that_is_too_high_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once in 30,000 buffers too few are above it, and then too few would be sent."""
    monkeypatch.setattr(selection, "_rank_in_sample", lambda density: 1)
    buffer = normal()
    expected = magnitudes_at(buffer, exact_top_k(buffer, 3000))
    assert torch.equal(magnitudes_at(buffer, sampled_top_k(buffer, 3000)), expected)


tied = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3e38, math.inf, -math.inf, math.nan])


@settings(deadline=None)
@given(values=st.lists(tied | st.floats(width=32), min_size=1, max_size=40), share=st.floats(0, 1))
@example(values=[-math.nan, math.inf, 1.0], share=0.0)
def test_every_selection_equals_sorting(values: list[float], share: float) -> None:
    """Ties, signs, or how what is not finite ranks."""

    def ranked(numbers: Tensor) -> list[tuple[float, bool]]:
        return sorted(
            (math.inf if math.isnan(v) else abs(v), math.isnan(v)) for v in numbers.tolist()
        )

    buffer = torch.tensor(values)
    k = max(1, round(share * len(values)))
    for name, select in SELECTIONS.items():
        positions = select(buffer, k)
        assert positions.unique().numel() == len(positions) == k, name
        assert ranked(buffer[positions]) == ranked(buffer)[-k:], name


@pytest.mark.parametrize(
    ("numel", "k", "way"),
    [
        (NUMEL, 3000, "sampled"),
        (NUMEL, NUMEL // 4, "exact"),
        (4096, 4, "exact"),
    ],
)
def test_auto_samples_where_that_is_faster(
    numel: int, k: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small or dense merge groups take the detour, or large ones do not take the short cut."""
    taken: list[str] = []
    for name in ("exact", "sampled"):
        monkeypatch.setattr(selection, f"{name}_top_k", lambda *_, name=name: taken.append(name))
    SELECTIONS["auto"](torch.zeros(numel), k)
    assert taken == [way]
