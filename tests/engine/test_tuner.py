"""A failure here is ranks that plan from different numbers, or by other numbers than measured."""

import pytest
import torch
from loopback import on_ranks, record_keys
from torch import nn

from lightning_mgwfbp.engine import tuner
from lightning_mgwfbp.exchange.compressors import Cast
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.plan import (
    AlphaBeta,
    DenseCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    Optimal,
    Threshold,
)

PARAMETERS = {name: nn.Parameter(torch.zeros(n)) for n, name in enumerate("abcd", start=1)}


def profiles(ready: list[dict[str, float]], forward: list[float]) -> list[ModelProfile]:
    def agree(transport: LoopbackTransport) -> ModelProfile:
        rank = transport.rank
        return tuner.agree_on_profile(transport, PARAMETERS, ready[rank], forward[rank], "net")

    return on_ranks(agree, world_size=len(ready))


def test_the_slowest_rank_counts() -> None:
    """A gradient is planned for before every rank has it."""
    ready = [{"d": 1.0, "c": 5.0, "b": 6.0, "a": 7.0}, {"d": 2.0, "c": 3.0, "b": 4.0, "a": 9.0}]
    ours, theirs = profiles(ready, [0.5, 0.25])
    assert ours == theirs
    assert ours.names == ("d", "c", "b", "a")
    assert ours.ready_seconds.tolist() == [2, 5, 6, 9]
    assert [layer.numel for layer in ours.layers] == [4, 3, 2, 1]
    assert [layer.shape for layer in ours.layers] == [(4,), (3,), (2,), (1,)]
    assert ours.forward_seconds == 0.5
    assert (ours.model, ours.note) == ("net", "measured on 2 ranks")


def test_order_is_that_of_readiness() -> None:
    """Order of registration is taken for the order of backward."""
    (profile,) = profiles([{"b": 1.0, "d": 2.0, "a": 4.0, "c": 8.0}], [0.0])
    assert profile.names == ("b", "d", "a", "c")
    assert [layer.backward_seconds for layer in profile.layers] == [1, 1, 2, 4]


def test_what_never_fired_comes_last() -> None:
    """An unused parameter is missing from the profile, or comes first."""
    ours, theirs = profiles([{"b": 1.0}, {"b": 1.0, "c": 3.0}], [0.0, 0.0])
    assert ours == theirs
    assert ours.names == ("b", "d", "c", "a")  # with c at the end, reversed registration decides
    assert ours.ready_seconds.tolist() == [1, 3, 3, 3]
    (nothing,) = profiles([{}], [0.0])
    assert nothing.names == ("d", "c", "b", "a")
    assert nothing.backward_seconds == 0


def test_different_measurements_end_in_one_plan() -> None:
    """Each rank plans from its own numbers: they differ, and training hangs."""
    everyone = [
        ModelProfile(
            "net", tuple(LayerProfile(n, 1000, "float32", s) for n in "dcba"), forward_seconds=0.0
        )
        for s in (0.0, 5.0)
    ]
    cost = DenseCost(AlphaBeta(1.0, 1 / 4000))
    own = [Optimal().plan(profile, cost) for profile in everyone]
    assert own[0] != own[1]

    def agree(transport: LoopbackTransport) -> MergePlan:
        return tuner.agree_on_plan(transport, everyone[transport.rank], Optimal(), cost)

    assert on_ranks(agree) == [own[0]] * 2


HALF, FLOAT, COMPLEX = torch.bfloat16, torch.float32, torch.complex64


@pytest.mark.parametrize(
    ("dtypes", "compressor", "expected"),
    [
        ([FLOAT, FLOAT, HALF], None, FLOAT),
        ([HALF, HALF, HALF, FLOAT], None, HALF),  # most bytes, and on a tie the first
        ([COMPLEX, HALF], None, FLOAT),
        ([FLOAT, HALF], Cast("float16"), torch.float16),
        ([HALF], Cast("float16"), HALF),
        ([torch.float64], Cast("bfloat16"), HALF),
    ],
    ids=str,
)
def test_wire_dtype(
    dtypes: list[torch.dtype], compressor: Cast | None, expected: torch.dtype
) -> None:
    """The link is timed in a dtype that hardly travels."""
    given = [nn.Parameter(torch.zeros(8, dtype=d)) for d in dtypes]
    assert tuner.wire_dtype(given, compressor) == expected


def test_the_link_is_timed_up_to_the_largest_group() -> None:
    """The fit extrapolates, or ranks get different fits."""

    def measure(transport: LoopbackTransport) -> tuple[AlphaBeta, float]:
        keys = record_keys(transport)
        given = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(50, dtype=COMPLEX))]
        fit = tuner.measure_link(transport, given, Cast("float16"), busy_fraction=1.0)
        assert keys
        return fit.link, fit.samples[-1][0]

    ours, theirs = on_ranks(measure)
    assert ours == theirs
    assert ours[1] == (300 + 2 * 50) * 2


def test_dense_cost_is_in_the_wire_format() -> None:
    """Compressed training is planned as if it were not."""
    layer = LayerProfile("weight", 1000, "float32", 0.0)
    profile = ModelProfile("net", (layer,), 0.0)
    link = AlphaBeta(0.0, 1.0)
    for compressor, nbytes in ((None, 4000), (Cast("bfloat16"), 2000)):
        cost = tuner.dense_cost(link, compressor)
        assert float(cost.communicate(cost.sizes(profile)[0])) == nbytes


def test_agree_on_plan_keeps_the_planners_name() -> None:
    """What is printed and saved says nothing about where the plan comes from."""
    profile = ModelProfile("net", (LayerProfile("weight", 1, "float32", 0.0),), 0.0)
    plan = tuner.agree_on_plan(
        LoopbackTransport.solo(), profile, Threshold(), DenseCost(AlphaBeta(0.0, 0.0))
    )
    assert plan.planner == "threshold"
