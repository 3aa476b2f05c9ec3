"""A failure here is a parameter in no bucket, in two, or in one of another dtype."""

from dataclasses import replace

import pytest
import torch
from engine_examples import plan_of
from torch import nn

from lightning_mgwfbp.engine.layout import Layout, adapted_plan, provisional_plan, split_by_storage
from lightning_mgwfbp.plan import MergePlan

FLOAT, HALF, COMPLEX = torch.float32, torch.bfloat16, torch.complex64


def parameters(*dtypes: torch.dtype, numel: int = 2) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(numel, dtype=d)) for d in dtypes]


def test_split_by_storage() -> None:
    """Two dtypes in one buffer, or the order within a dtype is lost."""
    given = parameters(FLOAT, HALF, FLOAT, COMPLEX, HALF)
    assert split_by_storage([4, 0, 1, 2, 3], given) == [[4, 1], [0, 2], [3]]
    assert split_by_storage([], given) == []


def test_each_group_is_a_bucket_for_each_dtype() -> None:
    """Launch order, or which merge group a bucket belongs to."""
    given = parameters(FLOAT, HALF, FLOAT, FLOAT, HALF)
    names = list("abcde")
    plan = MergePlan(("e", "d", "b", "c"), ((0, 3), (3, 4)))  # `a` is frozen
    layout = Layout(plan, names, given)
    assert layout.members == [[4, 1], [3], [2]]
    assert layout.bucket_of == [-1, 0, 2, 1, 0]
    assert layout.unplanned == [0]
    assert [b.buffer.dtype for b in layout.buckets] == [HALF, FLOAT, FLOAT]
    for bucket, members in zip(layout.buckets, layout.members, strict=True):
        assert all(p is given[i] for p, i in zip(bucket.parameters, members, strict=True))
    assert layout.descriptions == [
        "merge group 0 of 2 (e to b)",
        "merge group 0 of 2 (d to d)",
        "merge group 1 of 2 (c to c)",
    ]


def test_provisional_plan_is_reversed_and_filled_to_25_mib() -> None:
    """The plan before the measurement: order of backward, and DistributedDataParallel's sizes."""
    ten_mib = parameters(*[FLOAT] * 5, numel=10 * 2**18)
    plan = provisional_plan(list("abcde"), ten_mib, set("abce"))
    assert plan.names == tuple("ecba")
    assert plan.groups == ((0, 3), (3, 4))


PLAN = MergePlan(tuple("fedcb"), ((0, 2), (2, 3), (3, 5)), "mgwfbp")


@pytest.mark.parametrize(
    ("trainable", "groups"),
    [
        ("bcdef", ["fe", "d", "cb"]),
        ("bcef", ["fe", "cb"]),
        ("bcd", ["d", "cb"]),
        ("abcdefg", ["fe", "d", "cb", "ga"]),
        ("ad", ["d", "a"]),
        ("ag", ["ga"]),
    ],
)
def test_adapted_plan(trainable: str, groups: list[str]) -> None:
    """Groups that stay are torn apart, or one who left or came is lost."""
    plan = adapted_plan(PLAN, list("abcdefg"), parameters(*[FLOAT] * 7), set(trainable))
    assert ["".join(plan.names[a:b]) for a, b in plan.groups] == groups
    assert plan.planner == "mgwfbp"


def test_a_plan_from_the_examples_is_laid_out_whole() -> None:
    """Buckets do not partition the parameters of a real module."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    names, given = zip(*module.named_parameters(), strict=True)
    layout = Layout(plan_of(module, 1, 2, 1), names, given)
    assert layout.members == [[3], [2, 1], [0]]
    assert layout.unplanned == []


def test_what_may_be_compressed_comes_first() -> None:
    """A compressor is given a bias, or gradients are handed to the wrong parameters."""
    given = [nn.Parameter(torch.zeros(n)) for n in (2, 9, 3, 8)]
    plan = MergePlan(tuple("dcba"), ((0, 3), (3, 4)))
    layout = Layout(plan, list("abcd"), given, compresses=lambda p: p.numel() > 4)
    assert layout.members == [[3, 1, 2], [0]]  # d, b, then c; a
    assert [b.compressed for b in layout.buckets] == [2, 0]
    assert [b.body_numel for b in layout.buckets] == [17, 0]
    assert [b.names for b in layout.buckets] == [("d", "b", "c"), ("a",)]
    assert layout.descriptions[0] == "merge group 0 of 2 (d to b)"  # as the plan has it
    assert layout.bucket_of == [1, 0, 0, 0]


def test_the_plans_densities_are_the_buckets() -> None:
    """A group's density goes to another one where a group is several buckets."""
    given = parameters(FLOAT, HALF, FLOAT, FLOAT)
    plan = MergePlan(tuple("abcd"), ((0, 3), (3, 4)), densities=(0.5, None))
    assert Layout(plan, list("abcd"), given).densities == [0.5, 0.5, None]
    plan = MergePlan(tuple("abcd"), ((0, 3), (3, 4)))
    assert Layout(plan, list("abcd"), given).densities == [None] * 3


def test_of_sparse_gradients_only_the_flag_is_carried() -> None:
    """Zeros for a whole embedding travel in each message."""
    given = [nn.Parameter(torch.zeros(shape)) for shape in ((50, 4), (3,))]
    layout = Layout(MergePlan(("a", "b"), ((0, 2),)), ["a", "b"], given, lambda p: True, {0})
    (bucket,) = layout.buckets
    assert layout.members == [[1, 0]]
    assert (bucket.compressed, bucket.body_numel) == (1, 3)
    assert (bucket.data.numel(), bucket.tail.numel()) == (3, 5)


def test_an_adapted_plan_keeps_densities_of_groups_that_stay() -> None:
    """Densities move on to the next group when one has left."""
    plan = replace(PLAN, densities=(0.1, 0.2, 1.0))
    adapted = adapted_plan(plan, list("abcdefg"), parameters(*[FLOAT] * 7), set("acef"))
    assert ["".join(adapted.names[a:b]) for a, b in adapted.groups] == ["fe", "c", "a"]
    assert adapted.densities == (0.1, 1.0, None)
