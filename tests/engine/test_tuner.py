"""A failure here is ranks that plan from different numbers, or by other numbers than measured."""

from typing import Any

import pytest
import torch
from loopback import on_ranks, record_keys, recorded
from torch import nn

from lightning_mgwfbp.engine import measured_costs, tuner
from lightning_mgwfbp.exchange.compressors import Cast, Compressor, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.power_sgd import PowerSGD
from lightning_mgwfbp.exchange.transport import LoopbackTransport
from lightning_mgwfbp.plan import (
    AlphaBeta,
    CheaperCost,
    DenseCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    Optimal,
    SortSelection,
    SparseCost,
    Threshold,
    resolve_planner,
)

PARAMETERS = {name: nn.Parameter(torch.zeros(n)) for n, name in enumerate("abcd", start=1)}


def profiles(ready: list[dict[str, float]], forward: list[float]) -> list[ModelProfile]:
    def agree(transport: LoopbackTransport) -> ModelProfile:
        rank = transport.rank
        return tuner.agree_on_profile(transport, PARAMETERS, ready[rank], forward[rank], {}, "net")

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
        return tuner.agree_on_plan(transport, everyone[transport.rank], Optimal(), cost, None)

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
    assert measured_costs.wire_dtype(given, compressor) == expected


def test_the_link_is_timed_up_to_the_largest_group() -> None:
    """The fit extrapolates, or ranks get different fits."""

    def measure(transport: LoopbackTransport) -> tuple[AlphaBeta, float]:
        keys = record_keys(transport)
        given = [nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(50, dtype=COMPLEX))]
        fit = measured_costs.measure_link(transport, given, Cast("float16"), busy_fraction=1.0)
        assert keys
        return fit.link, fit.samples[-1][0]

    ours, theirs = on_ranks(measure)
    assert ours == theirs
    assert ours[1] == (300 + 2 * 50) * 2


def test_exchange_cost_is_in_the_wire_format() -> None:
    """Compressed training is planned as if it were not."""
    layer = LayerProfile("weight", 1000, "float32", 0.0)
    profile = ModelProfile("net", (layer,), 0.0)
    link = AlphaBeta(0.0, 1.0)
    for compressor, nbytes in ((None, 4000), (Cast("bfloat16"), 2000)):
        carried = [torch.empty(1000)]
        cost = measured_costs.exchange_cost(
            LoopbackTransport.solo(), carried, compressor, link, 1.0, is_given=False
        )
        assert float(cost.communicate(cost.sizes(profile)[0])) == nbytes


def test_agree_on_plan_keeps_the_planners_name() -> None:
    """What is printed and saved says nothing about where the plan comes from."""
    profile = ModelProfile("net", (LayerProfile("weight", 1, "float32", 0.0),), 0.0)
    plan = tuner.agree_on_plan(
        LoopbackTransport.solo(), profile, Threshold(), DenseCost(AlphaBeta(0.0, 0.0)), None
    )
    assert plan.planner == "threshold"


LARGE = LayerProfile("large", 100_000, "float32", 1.0)
SMALL = LayerProfile("small", 10, "float32", 1.0)
BOTH = ModelProfile("net", (LARGE, SMALL), 0.0)


def carried_by(profile: ModelProfile) -> list[torch.Tensor]:
    return [torch.empty(layer.numel) for layer in profile.layers]


def cost_of_both(
    transport: LoopbackTransport, compressor: Compressor, *, is_given: bool
) -> CheaperCost:
    cost = measured_costs.exchange_cost(
        transport, carried_by(BOTH), compressor, AlphaBeta(0.5, 1.0), 0.0, is_given=is_given
    )
    assert isinstance(cost, CheaperCost)
    return cost


@pytest.mark.parametrize("compressor", [TopK(0.01), RandomK(0.01), Quantize8()], ids=repr)
def test_a_compressor_is_costed_as_measured(compressor: Compressor) -> None:
    """Plans take no account of what is compressed, of small parameters, or of selection."""

    def measure(transport: LoopbackTransport) -> CheaperCost:
        return cost_of_both(transport, compressor, is_given=False)

    ours, theirs = on_ranks(measure)
    for cost in (ours, theirs):
        large, small = cost.sparse.sizes(BOTH)
        nbytes = float(compressor.wire_nbytes(LARGE.numel, 4, compressor.settled_density))
        link = cost.sparse.link
        assert float(cost.sparse.communicate(large)) == pytest.approx(float(link(nbytes)))
        assert float(cost.sparse.communicate(small)) == pytest.approx(float(link(SMALL.nbytes)))
        assert float(cost.sparse.select(large)) > 0
        assert float(cost.sparse.select(small)) == 0
        assert float(cost.dense.communicate(cost.dense.sizes(BOTH)[0])) == 0.5 + LARGE.nbytes
        # an all-gather has a link of its own; what is all-reduced has the one that was measured
        assert (link == AlphaBeta(0.5, 1.0)) == (compressor.collective == "all_reduce")
        assert link == ours.sparse.link
        assert float(cost.sparse.select(large)) == float(ours.sparse.select(large))


@pytest.mark.parametrize("compressor", [TopK(0.01), RandomK(0.01), Quantize8()], ids=repr)
def test_a_given_link_is_not_timed(compressor: Compressor) -> None:
    """A network that is elsewhere is planned for by the one that is here."""

    def give(transport: LoopbackTransport) -> AlphaBeta:
        messages = recorded(transport)
        cost = cost_of_both(transport, compressor, is_given=True)
        assert messages == []
        assert float(cost.sparse.select(cost.sparse.sizes(BOTH)[0])) > 0  # that is of this machine
        return cost.sparse.link

    gathered = compressor.collective == "all_gather"
    # of an all-reduce's 2 * 3 hops of a quarter each, 3 of the whole
    expected = AlphaBeta(0.25, 2.0) if gathered else AlphaBeta(0.5, 1.0)
    assert on_ranks(give, world_size=4) == [expected] * 4


@pytest.mark.parametrize(
    ("compressor", "nbytes", "density"),
    [
        (TopK("auto"), 8 * 100_010, 0.1),
        (TopK("auto", density_floor=0.3), 8 * 100_010, 0.3),
        (TopK(0.01), 8 * 1000, 0.01),
    ],
    ids=repr,
)
def test_what_the_plan_may_choose_is_timed(
    compressor: Compressor, nbytes: int, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An automatic density is planned by extrapolation from its floor."""
    densities = set()
    time_compression = measured_costs.time_compression

    def recording(*args: Any, **options: Any) -> Any:
        densities.add(options["density"])
        return time_compression(*args, **options)

    monkeypatch.setattr(measured_costs, "time_compression", recording)

    def measure(transport: LoopbackTransport) -> int:
        messages = recorded(transport)
        cost_of_both(transport, compressor, is_given=False)
        return max(sent for collective, _, sent in messages if collective == "all_gather")

    assert on_ranks(measure) == [nbytes] * 2
    assert densities == {density}


def test_low_rank_is_costed_without_measuring() -> None:
    """PowerSGD is planned as if all travelled, or as one message."""
    layer = LayerProfile("matrix", 10_000, "float32", 0.0, (100, 100))
    profile = ModelProfile("net", (layer,), 0.0)
    solo = LoopbackTransport.solo()
    keys = record_keys(solo)
    cost = measured_costs.exchange_cost(
        solo, carried_by(profile), PowerSGD(rank=2), AlphaBeta(3.0, 1.0), 0.0, is_given=False
    )
    assert float(cost.communicate(cost.sizes(profile)[0])) == 2 * 3.0 + 4 * 2 * 200
    assert keys == []


def compressed_cost(compressor: Compressor, seconds_per_byte: float) -> CheaperCost:
    """On a link whose start-up is 1 s; selection costs nothing."""
    sparse = SparseCost(
        AlphaBeta(1.0, seconds_per_byte),
        SortSelection(0.0),
        measured_costs.WireNbytes(compressor, compressor.settled_density),
    )
    return CheaperCost(DenseCost(AlphaBeta(1.0, seconds_per_byte)), sparse)


LAYERS = tuple(LayerProfile(n, 1000, "float32", 5.0) for n in "abcd")


def agreed(compressor: Compressor, seconds_per_byte: float) -> list[MergePlan]:
    profile = ModelProfile("net", LAYERS, 0.0)
    cost = compressed_cost(compressor, seconds_per_byte)
    wfbp = resolve_planner("wfbp")
    assert not isinstance(wfbp, str)
    return on_ranks(lambda t: tuner.agree_on_plan(t, profile, wfbp, cost, compressor))


def test_the_plan_says_which_groups_go_whole() -> None:
    """What is cheaper whole is compressed, or the other way round; each rank for itself."""
    assert [p.densities for p in agreed(TopK(0.01), 1.0)] == [()] * 2
    assert [p.densities for p in agreed(TopK(0.9), 1.0)] == [(1.0,) * 4] * 2  # more than it is


def test_an_automatic_density_hides() -> None:
    """A density of "auto" stays at its floor, or takes time."""
    ours, theirs = agreed(TopK("auto", density_floor=0.01), 1e-3)
    assert ours == theirs
    *hidden, last = ours.densities
    # a link that is free for 5 s, of which 1 s is the start-up: 4000 bytes are all of it, whole
    assert hidden == [1.0] * 3
    assert last == 0.01
    ours, _ = agreed(TopK("auto", density_floor=0.01), 2e-3)  # or a quarter, with positions
    assert ours.densities[:3] == pytest.approx((0.25,) * 3, rel=2e-3)
    ours, _ = agreed(TopK(0.01), 2e-3)
    assert ours.densities == ()


@pytest.mark.parametrize(
    ("compressor", "seconds_per_byte", "nbytes"),
    [
        (TopK(0.01), 1.0, [80] * 4),  # ten values with their positions
        (TopK(0.9), 1.0, [4000] * 4),
        (TopK("auto", density_floor=0.01), 1e-3, [4000] * 3 + [80]),
        (TopK("auto", density_floor=0.01), 2e-3, [2000] * 3 + [80]),
    ],
    ids=repr,
)
def test_wire_nbytes(compressor: Compressor, seconds_per_byte: float, nbytes: list[int]) -> None:
    """A plan is shown with other bytes than travel, or not with the densities that it chose."""
    plan, _ = agreed(compressor, seconds_per_byte)
    cost = compressed_cost(compressor, seconds_per_byte)
    told = tuner.wire_nbytes(ModelProfile("net", LAYERS, 0.0), plan, cost, compressor)
    assert told == pytest.approx(nbytes, rel=2e-3)


def test_wire_nbytes_of_all_reduces() -> None:
    """A cast is shown with the bytes of gradients."""
    plan, profile = MergePlan(tuple("abcd"), ((0, 1), (1, 4))), ModelProfile("net", LAYERS, 0.0)
    link = AlphaBeta(1.0, 1.0)
    assert tuner.wire_nbytes(profile, plan, DenseCost(link), None) == (4000, 12000)
    half = Cast("bfloat16")
    assert tuner.wire_nbytes(profile, plan, DenseCost(link, 2), half) == (2000, 6000)


def test_after_backward() -> None:
    """A method that needs the whole gradient is promised overlap."""
    profile = tuner.after_backward(ModelProfile("net", LAYERS, 2.0))
    assert profile.ready_seconds.tolist() == [20.0] * 4
    assert profile.backward_seconds == 20.0
    assert profile.forward_seconds == 2.0
    assert profile.names == tuple("abcd")
