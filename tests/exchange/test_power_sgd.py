"""A failure here is a part of a gradient that PowerSGD loses, or ranks whose averages differ."""

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from loopback import on_ranks, record_keys, same_bits
from ranks import run_ranks
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.exchange.exchangers import DenseExchanger, Exchanger
from lightning_mgwfbp.exchange.power_sgd import PowerSGD, PowerSGDExchanger, _first_factor
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import LoopbackTransport, Transport

METHOD = PowerSGD(rank=2, dense_below_numel=50)
SHAPES = {
    "linear": (20, 30),
    "bias": (70,),
    "conv": (8, 4, 3, 3),
    "small": (6, 8),
    "thin": (2, 40),
    "wide": (12, 40),
}
FACTORED = ("linear", "conv", "wide")
GROUPINGS = [
    [["wide", "bias"], ["small", "linear"], ["thin", "conv"]],
    [list(SHAPES)],
    [[name] for name in SHAPES],
    [["conv", "small"], ["thin"]],  # the others are absent
]
Gradients = dict[str, Tensor | None]


def parameter(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = torch.empty(SHAPES[name], dtype=dtype)
    return weight.to(memory_format=torch.channels_last) if name == "conv" else weight


def buckets_of(
    exchanger: Exchanger, groups: list[list[str]], dtype: torch.dtype = torch.float32
) -> list[Bucket]:
    buckets = []
    for group in groups:
        kinds: tuple[list[str], list[str]] = ([], [])
        for name in group:
            kinds[not exchanger.compresses(parameter(name, dtype))].append(name)
        names = kinds[0] + kinds[1]
        buckets.append(Bucket([parameter(n, dtype) for n in names], names, len(kinds[0])))
    exchanger.adopt(buckets)
    return buckets


def gradients(seed: int, rank: int, dtype: torch.dtype = torch.float32) -> Gradients:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def exchange(
    exchanger: Exchanger,
    buckets: Sequence[Bucket],
    given: Gradients,
    others: Sequence[Tensor] = (),
) -> dict[str, Tensor]:
    exchanges = []
    for number, bucket in enumerate(buckets):
        mine = [given[name] for name in bucket.names]
        bucket.pack(mine, [g is not None for g in mine])
        exchanges.append(exchanger.start(bucket, key=f"bucket {number}"))
    averages = {}
    for bucket, on_its_way in zip(buckets, exchanges, strict=True):
        on_its_way.finish()
        averages.update(zip(bucket.names, (g.clone() for g in bucket.gradients()), strict=True))
    exchanger.conclude(others)
    return averages


def residuals(exchanger: PowerSGDExchanger) -> dict[str, Tensor]:
    zeros = {name: torch.zeros(SHAPES[name]) for name in FACTORED}
    return zeros | exchanger.state_dict()["residual"]


def same_state(ours: Any, theirs: Any) -> bool:
    return all(
        ours[kind].keys() == theirs[kind].keys()
        and all(same_bits(ours[kind][name], theirs[kind][name]) for name in ours[kind])
        for kind in ("residual", "factor")
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=True)
    return loaded


def fifty_steps(
    transport: Transport, dtype: torch.dtype = torch.float32
) -> list[dict[str, tuple[Tensor, ...]]]:
    """For each step and matrix: M, average and residual; regrouped, and saved and loaded."""
    exchanger = PowerSGDExchanger(transport, METHOD)
    steps = []
    for step in range(50):
        if step % 4 == 0:
            buckets = buckets_of(exchanger, GROUPINGS[step // 4 % 4], dtype)
        if step == 26:
            state = through_a_file(exchanger.state_dict())
            states = transport.all_gather_object(state, key="states")
            exchanger = PowerSGDExchanger(transport, METHOD)
            exchanger.load_state_dict(states)
            assert same_state(exchanger.state_dict(), state)
        before, given = residuals(exchanger), gradients(step, transport.rank, dtype)
        averages, after = exchange(exchanger, buckets, given), residuals(exchanger)
        steps.append(
            {n: (given[n] + before[n], averages[n], after[n]) for n in FACTORED if n in averages}
        )
        assert all(same_bits(before[n], after[n]) for n in FACTORED if n not in averages)
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_is_lost(world_size: int, dtype: torch.dtype) -> None:
    """original == average + residual, on each rank and in the mean."""
    ranks = on_ranks(fifty_steps, dtype, world_size=world_size)
    for step in zip(*ranks, strict=True):
        for name in step[0]:
            originals, averages, rests = zip(*(rank[name] for rank in step), strict=True)
            assert averages[0].dtype == dtype
            for original, average, rest in zip(originals, averages, rests, strict=True):
                assert same_bits(average, averages[0])
                torch.testing.assert_close(
                    (average + rest).double(), original.double(), rtol=1e-6, atol=1e-6
                )
            torch.testing.assert_close(
                averages[0].double() + torch.stack(rests).double().mean(0),
                torch.stack(originals).double().mean(0),
                rtol=1e-6,
                atol=1e-6,
            )


def averages_of_steps(rank: int) -> list[dict[str, Tensor]]:
    transport = TorchTransport()
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[0])
    averages = [exchange(exchanger, buckets, gradients(step, rank)) for step in range(5)]
    transport.close()
    return averages


def averages_by_threads(transport: LoopbackTransport) -> list[dict[str, Tensor]]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[0])
    return [exchange(exchanger, buckets, gradients(step, transport.rank)) for step in range(5)]


def test_over_gloo() -> None:
    """Messages that overlap, which those of the loopback do not."""
    for ours, theirs in zip(
        run_ranks(averages_of_steps), on_ranks(averages_by_threads), strict=True
    ):
        for mine, other in zip(ours, theirs, strict=True):
            assert all(same_bits(mine[name], other[name]) for name in SHAPES)


def orthonormal(columns: Tensor) -> Tensor:
    """Gram-Schmidt, as algorithm 1 has it."""
    done: list[Tensor] = []
    for column in columns.t():
        rest = column - sum((other * (other @ column) for other in done), torch.zeros(()))
        done.append(rest / rest.norm())
    return torch.stack(done, dim=1)


def by_the_paper(name: str, steps: int, world_size: int) -> list[Tensor]:
    """Algorithms 1 and 2, all ranks at once."""
    n, m = SHAPES[name][0], torch.Size(SHAPES[name][1:]).numel()
    q = _first_factor(name, (METHOD.rank, m)).t().double()
    rests = [torch.zeros(n, m, dtype=torch.float64) for _ in range(world_size)]
    averages = []
    for step in range(steps):
        given = [gradients(step, rank, torch.float64)[name] for rank in range(world_size)]
        originals = [g.reshape(n, m) + rest for g, rest in zip(given, rests, strict=True)]  # type: ignore[union-attr]
        p = orthonormal(torch.stack([each @ q for each in originals]).mean(0))
        q = torch.stack([each.t() @ p for each in originals]).mean(0)
        averages.append((p @ q.t()).view(SHAPES[name]))
        rests = [each - p @ q.t() for each in originals]
    return averages


def in_double(transport: LoopbackTransport, steps: int) -> list[dict[str, Tensor]]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[0], torch.float64)
    return [
        exchange(exchanger, buckets, gradients(step, transport.rank, torch.float64))
        for step in range(steps)
    ]


def test_it_is_the_papers_algorithm() -> None:
    """The iteration itself: what is multiplied by what, or kept from the step before."""
    expected = {name: by_the_paper(name, steps=8, world_size=3) for name in FACTORED}
    for averages in on_ranks(in_double, 8, world_size=3):
        for step, average in enumerate(averages):
            for name in FACTORED:
                torch.testing.assert_close(average[name], expected[name][step], rtol=0, atol=1e-10)


def of_rank_one(transport: LoopbackTransport) -> float:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, [["linear"]])
    rows, columns = torch.linspace(-1, 1, 20), torch.linspace(0.5, 2, 30)
    worst = 0.0
    for step in range(4):
        given = torch.outer(rows * (step + 1), columns + transport.rank)  # of the mean: 0.5
        average = exchange(exchanger, buckets, {"linear": given})["linear"]
        expected = torch.outer(rows * (step + 1), columns + 0.5)
        worst = max(worst, float((average - expected).abs().max()) if step else 0.0)
    return worst


def test_what_is_of_low_rank_arrives_whole() -> None:
    """Columns of P that are not orthonormal."""
    assert max(on_ranks(of_rank_one)) < 1e-5


def silent_first(transport: LoopbackTransport) -> Tensor:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, [["linear"]])
    given = torch.zeros(SHAPES["linear"])
    exchange(exchanger, buckets, {"linear": given})
    given[10] = torch.linspace(-1, 1, 30)
    return exchange(exchanger, buckets, {"linear": given})["linear"][10]


def test_a_matrix_of_zeros_does_not_silence_a_parameter() -> None:
    """An embedding whose factor has become zero never finds its rows again."""
    for row in on_ranks(silent_first):
        torch.testing.assert_close(row, torch.linspace(-1, 1, 30))


def beside_dense(transport: LoopbackTransport) -> bool:
    exchanger, dense = PowerSGDExchanger(transport, METHOD), DenseExchanger(transport)
    assert exchanger.keeps_residuals
    same = True
    for groups in GROUPINGS:
        given = gradients(3, transport.rank)
        ours = exchange(exchanger, buckets_of(exchanger, groups), given)
        theirs = exchange(dense, buckets_of(dense, groups), given)
        same &= all(same_bits(ours[n], theirs[n]) for n in ours if n not in FACTORED)
    return same


def test_the_others_travel_exactly() -> None:
    """Vectors, small matrices and those of full rank, which are packed with factors."""
    assert on_ranks(beside_dense, world_size=3) == [True] * 3


def not_finite(transport: LoopbackTransport, bad: float, where: str) -> list[bool]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[0])
    exchange(exchanger, buckets, gradients(0, transport.rank))
    before = exchanger.state_dict()
    given = gradients(1, transport.rank)
    if transport.rank == 1 and where in given:
        given[where].view(-1)[3] = bad  # type: ignore[union-attr]
    others = [torch.zeros(0), torch.tensor([1.0, bad if where == "elsewhere" else 2.0])]
    averages = exchange(exchanger, buckets, given, others)
    seen = where == "elsewhere" or not bool(averages[where].isfinite().all())
    return [seen, same_state(exchanger.state_dict(), before)]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["linear", "conv", "bias", "elsewhere"])
def test_what_is_not_finite_is_seen_everywhere_and_kept_nowhere(bad: float, where: str) -> None:
    """A step that a GradScaler skips leaves its mark in the residuals."""
    assert on_ranks(not_finite, bad, where) == [[True, True]] * 2


def half_used(transport: LoopbackTransport) -> Tensor:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, [["linear", "bias"]])
    given = gradients(0, 0)
    if transport.rank == 1:
        given["linear"] = None
    steps = [exchange(exchanger, buckets, given)["linear"] for _ in range(200)]
    return torch.stack(steps[100:]).mean(0)


def test_a_parameter_that_one_rank_does_not_use() -> None:
    """What others' residuals hold against this rank's is never made up for: the average doubles."""
    expected = gradients(0, 0)["linear"] / 2  # type: ignore[operator]
    for average in on_ranks(half_used):
        assert float((average - expected).norm() / expected.norm()) < 0.1


def unused(transport: LoopbackTransport) -> list[bool]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[1])
    exchange(exchanger, buckets, gradients(0, transport.rank))
    before = exchanger.state_dict()
    given = {**gradients(1, transport.rank), "linear": None}
    averages = exchange(exchanger, buckets, given)
    after = exchanger.state_dict()
    kept = [same_bits(before[kind]["linear"], after[kind]["linear"]) for kind in before]
    return [not averages["linear"].any(), *kept, not same_state(before, after)]


def test_a_parameter_that_no_rank_uses() -> None:
    """Its residual is sent to nobody."""
    assert on_ranks(unused) == [[True] * 4] * 2


def five_steps(transport: LoopbackTransport, scale: float) -> tuple[dict[str, Tensor], Any, int]:
    asked: list[float] = []

    def gradient_scale() -> float:
        asked.append(scale)
        return scale

    exchanger = PowerSGDExchanger(transport, METHOD)
    exchanger.gradient_scale = gradient_scale
    buckets = buckets_of(exchanger, GROUPINGS[0])
    for step in range(5):
        given = {n: g * scale for n, g in gradients(step, transport.rank).items()}  # type: ignore[operator]
        averages = exchange(exchanger, buckets, given)
    return (
        {n: average / scale for n, average in averages.items()},
        exchanger.state_dict(),
        len(asked),
    )


@pytest.mark.parametrize("scale", [2.0**16, 2.0**-20])
def test_the_loss_scale_changes_nothing(scale: float) -> None:
    """Residuals in scaled units, which mean something else after the scale has changed."""
    for ours, theirs in zip(on_ranks(five_steps, scale), on_ranks(five_steps, 1.0), strict=True):
        assert all(same_bits(ours[0][name], theirs[0][name]) for name in SHAPES)
        assert same_state(ours[1], theirs[1])
        assert ours[2] == 5  # asking waits for a GPU


def state_after(transport: LoopbackTransport, steps: int) -> Any:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, GROUPINGS[1])
    for step in range(steps):
        exchange(exchanger, buckets, gradients(step, transport.rank))
    return exchanger.state_dict()


def loaded(transport: LoopbackTransport, states: list[Any], method: PowerSGD = METHOD) -> Any:
    exchanger = PowerSGDExchanger(transport, method)
    exchanger.load_state_dict(states)
    state = exchanger.state_dict()
    exchange(exchanger, buckets_of(exchanger, GROUPINGS[1]), gradients(9, transport.rank))
    return state


@pytest.mark.parametrize("world_size", [2, 4])
def test_another_number_of_ranks_keeps_the_mean(world_size: int) -> None:
    """(sum of new) / new P = (sum of old) / old P."""
    old = on_ranks(state_after, 3, world_size=3)
    new = on_ranks(loaded, old, world_size=world_size)
    for name in FACTORED:
        expected = torch.stack([state["residual"][name] for state in old]).mean(0)
        for state in new:
            torch.testing.assert_close(state["residual"][name], expected)
            torch.testing.assert_close(state["factor"][name], old[0]["factor"][name])
            assert same_bits(state["factor"][name], new[0]["factor"][name])


def test_a_state_of_another_rank_or_model() -> None:
    """A changed `rank=...` ends the run that loads a checkpoint, or a changed model does not."""
    states = on_ranks(state_after, 2)
    assert all(on_ranks(loaded, states, PowerSGD(rank=3, dense_below_numel=50)))
    assert on_ranks(loaded, [{}, {}]) == [{"residual": {}, "factor": {}}] * 2
    for state in states:
        state["residual"]["linear"] = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"residual of 'linear' has shape \(3, 4\)"):
        on_ranks(loaded, states)


def keys_of(transport: LoopbackTransport) -> list[str]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    buckets = buckets_of(exchanger, [["linear"], ["bias"], ["conv", "thin"], ["wide"]])
    keys = record_keys(transport)
    exchange(exchanger, buckets, gradients(0, transport.rank))
    return keys


def test_order_of_messages() -> None:
    """A second message that is not launched before the next bucket's first, or too late."""
    expected = [f"bucket {n}" for n in ("0 P", "0 Q", "1", "2 P", "2 Q", "3 P", "3 Q")]
    assert on_ranks(keys_of) == [expected] * 2


def under_autocast(transport: LoopbackTransport, dtype: torch.dtype | None) -> dict[str, Tensor]:
    exchanger = PowerSGDExchanger(transport, METHOD)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        return exchange(exchanger, buckets_of(exchanger, GROUPINGS[1]), gradients(0, 0))


def test_backward_under_autocast() -> None:
    """Products in bfloat16, which cannot be orthonormalised."""
    ours, theirs = on_ranks(under_autocast, torch.bfloat16), on_ranks(under_autocast, None)
    assert all(same_bits(ours[0][name], theirs[0][name]) for name in SHAPES)


@pytest.mark.parametrize(
    ("shape", "numel"),
    [((20, 30), 100), ((8, 4, 3, 3), 88), ((70,), 70), ((6, 8), 48), ((2, 40), 80), ((0, 9), 0)],
)
def test_wire_numel(shape: tuple[int, ...], numel: int) -> None:
    """Planners are told another size than the one that travels."""
    assert METHOD.wire_numel(shape) == numel
    exchanger = PowerSGDExchanger(LoopbackTransport.solo(), METHOD)
    assert exchanger.compresses(torch.empty(shape)) == (numel < torch.Size(shape).numel())
    assert not exchanger.compresses(torch.empty(shape, dtype=torch.complex64))


@pytest.mark.parametrize("given", [0, -1, True, 2.0, "4", None])
def test_rank_must_be_a_whole_number(given: Any) -> None:
    """A typing error fails in the first step."""
    with pytest.raises(ValueError, match=r"`PowerSGD\(rank=\.\.\.\)` must be .*, got .*for 4"):
        PowerSGD(rank=given)


@pytest.mark.parametrize("given", [-1, False, 0.5])
def test_dense_below_numel_must_be_a_whole_number(given: Any) -> None:
    """The same."""
    with pytest.raises(ValueError, match=r"`PowerSGD\(dense_below_numel=\.\.\.\)` must be .*, got"):
        PowerSGD(dense_below_numel=given)


def test_yaml() -> None:
    """LightningCLI cannot build it."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--compressor", type=PowerSGD | None)
    chosen = {"class_path": f"{PowerSGD.__module__}.PowerSGD", "init_args": {"rank": 8}}
    built = parser.instantiate_classes(parser.parse_object({"compressor": chosen}))
    assert built.compressor == PowerSGD(rank=8)
