"""A failure here is a wrong price: bytes on the wire, seconds of a message, or the link's fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mgwfbp.plan import (
    AlphaBeta,
    DenseCost,
    LayerProfile,
    ModelProfile,
    TableCost,
    fit_alpha_beta,
)

MIXED = ModelProfile(
    "mixed",
    tuple(
        LayerProfile(dtype, 10, dtype, 0.0)
        for dtype in ("float64", "float32", "bfloat16", "float8_e5m2", "complex64", "complex128")
    ),
    0.0,
)


@pytest.mark.parametrize(
    ("wire_itemsize", "sizes"),
    [
        (None, [80, 40, 20, 10, 80, 160]),
        (4, [40, 40, 20, 10, 80, 80]),
        (2, [20, 20, 20, 10, 40, 40]),
    ],
)
def test_wire_bytes(wire_itemsize: int | None, sizes: list[int]) -> None:
    """A wire dtype widens a gradient, or a complex number is not two reals."""
    link = AlphaBeta(0.0, 1.0)
    assert DenseCost(link, wire_itemsize).sizes(MIXED).tolist() == sizes
    table = TableCost(((0, 0.0), (1, 1.0)), wire_itemsize)
    assert table.sizes(MIXED).tolist() == sizes
    assert table.offsets(MIXED).tolist() == [0, *np.cumsum(sizes)]


def test_alpha_beta_is_a_line_for_numbers_and_arrays() -> None:
    """The link's seconds are not alpha + beta * bytes, elementwise."""
    link = AlphaBeta(0.5, 0.25)
    assert float(link(2)) == 1.0
    assert link([[0, 2], [4, 8]]).tolist() == [[0.5, 1.0], [1.5, 2.5]]


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), "1e-4", True, None, 10**400])
def test_alpha_beta_refuses(name: str, value: object) -> None:
    """A link that is no link is accepted, or the error does not name which number is wrong."""
    with pytest.raises(ValueError, match=f"^{name} must be a finite number"):
        AlphaBeta(**{"alpha": 0.0, "beta": 0.0, name: value})


def test_alpha_beta_file(tmp_path: Path) -> None:
    """A saved link is not the link that was saved, or a broken file is not named."""
    path = tmp_path / "link.json"
    AlphaBeta(1.5e-4, 8e-9).save(path)
    assert json.loads(path.read_text()) == {"format": 1, "alpha": 1.5e-4, "beta": 8e-9}
    assert AlphaBeta.load(path) == AlphaBeta(1.5e-4, 8e-9)
    path.write_text('{"format": 1, "alpha": 0.1}')
    with pytest.raises(ValueError, match=r"link\.json: lacks the key 'beta'"):
        AlphaBeta.load(path)


def test_table_interpolates() -> None:
    """Between, below or beyond the points the table's seconds are not as documented."""
    cost = TableCost(((10, 1.0), (20, 2.0), (40, 3.0)))
    assert cost.communicate([0, 10, 15, 30, 40, 60]).tolist() == [1.0, 1.0, 1.5, 2.5, 3.0, 4.0]
    assert float(TableCost(((0, 2.0), (10, 1.0))).communicate(100)) == 1.0


@pytest.mark.parametrize("points", [(), ((1, 1.0),), ((2, 1.0), (1, 2.0)), ((0, -1.0), (1, 1.0))])
def test_table_refuses(points: tuple[tuple[float, float], ...]) -> None:
    """Points that give no function are accepted."""
    with pytest.raises(ValueError, match="points"):
        TableCost(points)


@settings(max_examples=60, deadline=None)
@given(alpha=st.floats(1e-5, 1e-2), beta=st.floats(1e-10, 1e-8), seed=st.integers(0, 2**32 - 1))
def test_fit_recovers_a_planted_link(alpha: float, beta: float, seed: int) -> None:
    """A fifth of grossly slow samples bends the fit, or small sizes do not count."""
    generator = np.random.default_rng(seed)
    nbytes = np.repeat(8.0 * 4.0 ** np.arange(14), 5)  # 8 bytes to 512 MiB, five times each
    seconds = (alpha + beta * nbytes) * generator.normal(1, 0.01, nbytes.size)
    slow = generator.permutation(nbytes.size)[: nbytes.size // 5]
    seconds[slow] *= 5
    fit = fit_alpha_beta(list(zip(nbytes.tolist(), seconds.tolist(), strict=True)))
    assert fit.link.alpha == pytest.approx(alpha, rel=0.04)
    assert fit.link.beta == pytest.approx(beta, rel=0.04)


def test_fit_of_an_exact_line() -> None:
    """Samples on a line are not fitted by it, or what is said of the fit is wrong."""
    fit = fit_alpha_beta([(0, 1.0), (10, 2.0), (30, 4.0)])
    assert (fit.link.alpha, fit.link.beta) == pytest.approx((1.0, 0.1))
    assert fit.r_squared == pytest.approx(1.0)
    assert fit.residuals == pytest.approx((0, 0, 0), abs=1e-9)
    assert fit.samples == ((0, 1.0), (10, 2.0), (30, 4.0))


@pytest.mark.parametrize(
    ("samples", "alpha", "beta"),
    [
        ([(1, 3.0), (100, 2.0), (1000, 2.0)], 2.0, 0.0),  # falling: no bandwidth to be seen
        ([(10, 1.0), (20, 2.5), (40, 5.0), (80, 10.0)], 0.0, 0.125),  # convex: no latency
        ([(1, 2.0), (5, 2.0)], 2.0, 0.0),
    ],
)
def test_fit_is_never_negative(
    samples: list[tuple[float, float]], alpha: float, beta: float
) -> None:
    """Samples that a negative alpha or beta would describe best lead to one."""
    link = fit_alpha_beta(samples).link
    assert (link.alpha, link.beta) == pytest.approx((alpha, beta), rel=1e-3, abs=1e-12)


@pytest.mark.parametrize("samples", [[], [(8, 1.0)], [(8, 1.0), (8, 2.0)]])
def test_fit_needs_two_sizes(samples: list[tuple[float, float]]) -> None:
    """A line is drawn through less than two sizes."""
    with pytest.raises(ValueError, match="at least two sizes"):
        fit_alpha_beta(samples)


@pytest.mark.parametrize("sample", [(-1, 1.0), (8, float("nan")), (8, 0.0), (8, -1.0)])
def test_fit_refuses_samples(sample: tuple[float, float]) -> None:
    """A size or time that cannot have been measured is fitted."""
    with pytest.raises(ValueError, match="samples must"):
        fit_alpha_beta([(1, 1.0), sample])


@pytest.mark.parametrize(
    ("link", "said"),
    [
        (AlphaBeta(1e-4, 8e-9), "alpha 100.0 us, beta 8 ns per byte"),
        (AlphaBeta(1e-4, 1e-13), "alpha 100.0 us, beta 0.0001 ns per byte"),
        (AlphaBeta(1e-4, 0.0), "beta 0: the link is faster than messages of these sizes can show"),
    ],
)
def test_a_link_in_words(link: AlphaBeta, said: str) -> None:
    """A fast link's beta is rounded to 0, or one of 0 is printed without a word."""
    assert said in str(link)
