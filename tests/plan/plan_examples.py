"""Small profiles and costs for the planners' and the simulator's tests, and a brute force."""

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from hypothesis import strategies as st

from lightning_mgwfbp.plan import (
    AlphaBeta,
    CheaperCost,
    Cost,
    DenseCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    SortSelection,
    SparseCost,
    Table,
    TableCost,
    TopKPairs,
    simulate,
)


def make_profile(seconds: Sequence[float], numels: Sequence[int]) -> ModelProfile:
    layers = (
        LayerProfile(f"p{index}", numel, "float32", duration)
        for index, (duration, numel) in enumerate(zip(seconds, numels, strict=True))
    )
    return ModelProfile("example", tuple(layers), forward_seconds=0.0)


def partitions(count: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way of cutting `count` gradients into consecutive groups."""
    for cuts in range(count):
        for inner in combinations(range(1, count), cuts):
            yield tuple(pairwise((0, *inner, count)))


def end_of(profile: ModelProfile, groups: Sequence[tuple[int, int]], cost: Cost) -> float:
    plan = MergePlan(profile.names, tuple(groups))
    return simulate(profile, plan, cost).communication_end_seconds


# Eighths and small integers make many exact ties; plain floats make ties only up to rounding.
exact = st.integers(0, 6).map(lambda eighths: eighths / 8)
rough = st.floats(0, 2).map(lambda value: 0.0 if value < 1e-6 else value)


@st.composite
def profiles(
    draw: st.DrawFn,
    most_layers: int = 9,
    durations: tuple[st.SearchStrategy[float], ...] = (exact, rough, st.just(0.0)),
) -> ModelProfile:
    count = draw(st.integers(1, most_layers))
    duration = draw(st.sampled_from(durations))
    numel = draw(st.sampled_from((st.integers(0, 3), st.integers(0, 10**6), st.just(1))))
    return make_profile(
        draw(st.lists(duration, min_size=count, max_size=count)),
        draw(st.lists(numel, min_size=count, max_size=count)),
    )


@st.composite
def dense_costs(draw: st.DrawFn) -> DenseCost:
    beta = draw(st.sampled_from((0.0, 1 / 32, 1 / 4, 1e-6, 0.0123)))
    return DenseCost(AlphaBeta(draw(st.one_of(st.just(0.0), exact, rough)), beta))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    sizes = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=5)))
    return Table(tuple((size, draw(exact)) for size in sizes))


def table_costs() -> st.SearchStrategy[TableCost]:
    return tables().map(lambda table: TableCost(tuple(table.points)))


@st.composite
def sparse_costs(draw: st.DrawFn) -> SparseCost:
    sorting = st.sampled_from((0.0, 1 / 16, 1e-7, 0.0123)).map(SortSelection)
    density = draw(st.sampled_from((1e-6, 0.1, 0.25, 0.3, 0.5, 1.0)))
    return SparseCost(
        draw(dense_costs()).link,
        draw(st.one_of(sorting, tables())),
        TopKPairs(density),
        exact_below=draw(st.sampled_from((0, 2, 1000))),
    )


costs = st.one_of(dense_costs(), table_costs())
selecting_costs = st.one_of(sparse_costs(), st.builds(CheaperCost, costs, sparse_costs()))
