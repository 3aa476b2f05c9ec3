"""A failure here is a wrong price of a sparse exchange: k, bytes, selection, or the cheaper way."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import make_profile

from lightning_mgwfbp.plan import (
    AlphaBeta,
    CheaperCost,
    DenseCost,
    LayerProfile,
    ModelProfile,
    SortSelection,
    SparseCost,
    Table,
    TopKPairs,
    all_gather_link,
    selected,
)

BYTES = AlphaBeta(0.0, 1.0)  # a second per byte


@given(st.integers(1, 10**9), st.floats(0, 1, exclude_min=True))
def test_selected(numel: int, density: float) -> None:
    """k is not max(1, round(density * numel)), or is another for arrays."""
    expected = max(1, round(density * numel))
    assert selected(numel, density) == expected
    assert selected(np.array([[0.0, numel]]), density).tolist() == [[0, expected]]


def test_selected_rounds_half_to_even_and_nothing_to_nothing() -> None:
    """Halves are rounded otherwise than by Python, or one of no elements travels."""
    assert [selected(numel, 0.5) for numel in (0, 1, 3, 5, 7)] == [0, 1, 2, 2, 4]
    assert isinstance(selected(10, 0.3), int)


def test_pairs_need_wide_indices_beyond_int32() -> None:
    """An index has not 4 bytes, or 8 where 4 do not reach."""
    pairs = TopKPairs(0.5)
    numels = np.array([0.0, 10, 2.0**31, 2.0**31 + 2])
    itemsizes = np.array([4.0, 2, 4, 4])
    assert pairs(numels, itemsizes).tolist() == [0, 5 * 6, 2**30 * 8, (2**30 + 1) * 12]


@pytest.mark.parametrize("density", [0, -0.1, 1.1, math.nan, True, None, "0.1"])
def test_density_is_refused(density: object) -> None:
    """A density that is no fraction is accepted."""
    with pytest.raises(ValueError, match=r"`TopKPairs\(density=...\)` must be in \(0, 1\]"):
        TopKPairs(density)  # type: ignore[arg-type]


def test_all_gather_link() -> None:
    """A ring of P ranks takes not P - 1 hops."""
    assert all_gather_link(0.5, 0.25, 5) == AlphaBeta(2.0, 1.0)


def test_sort_selection() -> None:
    """Sorting costs otherwise than n * log2 n, or one element, or none, costs something."""
    assert SortSelection(0.5)([0, 1, 2, 8]).tolist() == [0, 0, 1, 12]


def test_sizes() -> None:
    """What is compressed, how wide its values travel, or what travels whole is wrong."""
    dtypes = ("float64", "float32", "bfloat16", "complex64", "float16")
    layers = [LayerProfile(dtype, 100, dtype, 0.0) for dtype in dtypes]
    profile = ModelProfile("mixed", (*layers, LayerProfile("bias", 9, "float16", 0.0)), 0.0)
    cost = SparseCost(BYTES, SortSelection(0.0), TopKPairs(0.1), exact_below=10)
    assert cost.sizes(profile).tolist() == [
        [100, 800, 0],
        [100, 400, 0],
        [100, 400, 0],
        [200, 800, 0],
        [100, 400, 0],
        [0, 0, 18],
    ]
    narrow = SparseCost(BYTES, SortSelection(0.0), TopKPairs(0.1), least_itemsize=2)
    assert narrow.sizes(profile)[4:].tolist() == [[100, 200, 0], [9, 18, 0]]
    offsets = cost.offsets(profile)
    assert offsets.shape == (7, 3)
    assert cost.communicate(offsets[[2, 6]] - offsets[[1, 4]]).tolist() == [80, 10 * 8 + 18]


def test_a_group_that_is_only_exact_is_not_selected() -> None:
    """Nothing to select takes the seconds of the table's first point."""
    cost = SparseCost(BYTES, Table(((1, 2.0), (3, 4.0))), TopKPairs(0.5))
    assert cost.select([[0, 0, 12], [1, 4, 12], [2, 8, 0]]).tolist() == [0, 2, 3]
    assert float(cost.communicate([0, 0, 12])) == 12


def test_cheaper_way() -> None:
    """Which way is cheaper is another on each clock, or an equal price is not dense."""
    profile = make_profile([0, 0, 0], [1, 4, 100])
    sparse = SparseCost(AlphaBeta(4.0, 1.0), SortSelection(0.5), TopKPairs(0.25))
    cost = CheaperCost(DenseCost(BYTES), sparse)
    sizes = cost.sizes(profile)
    # dense 4, 16, 400 seconds; sparse 0 + 12, 4 + 12, 332 + 204
    assert cost.is_dense(sizes).tolist() == [True, True, True]
    assert cost.select(sizes).tolist() == [0, 0, 0]
    slower = CheaperCost(DenseCost(AlphaBeta(0.0, 1.5)), sparse)
    assert slower.is_dense(sizes).tolist() == [True, False, False]
    assert slower.select(sizes)[:2].tolist() == [0, 4]
    assert slower.communicate(sizes).tolist() == [6, 12, 204]
    assert float(slower.communicate(sizes[1])) == 12
    assert slower.nbytes(sizes).tolist() == [4, 8, 200]
