"""A failure here is a wrong cost of the halves of an all-reduce, or a bound that is not one."""

import numpy as np
import pytest
from cross_examples import halves
from hypothesis import given
from hypothesis import strategies as st
from plan_examples import make_profile

from lightning_mgwfbp.plan import AlphaBeta, DenseCost, Half, HalvesCost, MergePlan, Table, simulate


def test_both_in_a_row_are_an_all_reduce() -> None:
    """The halves of a given link do not add up to it, or not in the wire's dtype."""
    link = AlphaBeta(1.0, 0.25)
    profile = make_profile([1, 1, 6], [1, 3, 2])
    plan = MergePlan(profile.names, ((0, 1), (1, 3)))
    cost = HalvesCost.of_all_reduce(link, wire_itemsize=2)
    assert cost.reduce_scatter(8) == cost.all_gather(8) == 1.5
    assert simulate(profile, plan, cost) == simulate(profile, plan, DenseCost(link, 2))


def test_least_seconds_of_a_line_and_of_a_table() -> None:
    """The bound is lower than need be: without the start-up, or above a table's best rate."""
    link = AlphaBeta(1.0, 0.25)
    cost = HalvesCost(link, link)
    assert cost.least_seconds_within([0.0, 4.0], 8.0).tolist() == [2.0, 4.0]
    dip = Table(((1, 3.0), (4, 4.0), (8, 16.0)))  # best at 4 bytes, 1 second each
    cost = HalvesCost(dip, AlphaBeta(0.0, 0.0))
    assert cost.least_seconds(8) == pytest.approx(8.0)
    assert cost.least_seconds_within(0.0, 8.0) == 3.0
    assert cost.least_seconds_within(2.0, 8.0) == pytest.approx(10 / 3)  # by (1, 3) and (4, 4)


@given(halves, st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=5))
def test_no_messages_undercut_the_least_seconds(
    half: Half, messages: list[tuple[int, int]]
) -> None:
    """Some messages carry the bytes in fewer seconds, alone or with others beside them."""
    cost = HalvesCost(half, AlphaBeta(0.0, 0.0))
    wanted, beside = map(np.array, zip(*messages, strict=True))
    seconds = float(half(wanted + beside).sum())
    least = cost.least_seconds_within(wanted.sum(), float(np.sum(wanted + beside)))
    assert least <= seconds * (1 + 1e-12)
