"""Where each parameter's gradient travels: a merge plan laid out as buckets.

A merge group of one dtype on one device is one bucket, thus one message; a group of several is one
bucket for each, launched one after the other. Of a parameter whose gradients are sparse a bucket
carries the usage flag only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_mgwfbp.exchange.buckets import Bucket
from lightning_mgwfbp.plan import (
    AlphaBeta,
    DenseCost,
    LayerProfile,
    MergePlan,
    ModelProfile,
    Threshold,
)

Key = TypeVar("Key", int, str)


class Layout:
    """The buckets of a plan, in launch order.

    Args:
        plan: names parameters, not necessarily all of them.
        names, parameters: all parameters of the model, (N,) each.
        compresses: says which gradients may be compressed: they come first in their buckets.
        rowwise: indices of the parameters whose gradients are sparse.

    Attributes:
        buckets: (B,).
        densities: what the plan has chosen for each bucket, if it has, (B,).
        pieces: of each bucket, if the plan has any, (B,).
        gather_order: of the pieces, each by its bucket, if the plan has one.
        members: indices into `parameters` for each bucket, (B,) of lists.
        descriptions: for each bucket which merge group it is (part) of, and what it carries, (B,).
        bucket_of: bucket of each parameter, (N,); -1 for one that is not in the plan.
        carried: what each planned parameter puts into its bucket, by name, in the order of
            registration: nothing where its gradients are sparse.
    """

    def __init__(
        self,
        plan: MergePlan,
        names: Sequence[str],
        parameters: Sequence[nn.Parameter],
        compresses: Callable[[Tensor], bool] = lambda _: False,
        rowwise: Collection[int] = (),
    ) -> None:
        self.plan = plan
        self.rowwise = frozenset(rowwise)
        index_of = {name: i for i, name in enumerate(names)}
        self.members: list[list[int]] = []
        self.buckets: list[Bucket] = []
        self.densities: list[float | None] = []
        # made once here, since the reducer names a bucket whenever it launches or waits
        self.descriptions: list[str] = []
        parts_of: list[list[int]] = []  # buckets of each group
        groups = zip(plan.groups, plan.density_of_groups, strict=True)
        for group, ((start, stop), density) in enumerate(groups):
            indices = [index_of[name] for name in plan.names[start:stop]]
            parts_of.append([])
            for part in split_by_storage(indices, parameters):
                first, last = names[part[0]], names[part[-1]]
                self.descriptions.append(
                    f"merge group {group} of {len(plan.groups)} ({first} to {last})"
                )
                self.densities.append(density)
                compressed = [i for i in part if i not in rowwise and compresses(parameters[i])]
                members = list(dict.fromkeys(compressed + part))  # the others behind them
                parts_of[-1].append(len(self.buckets))
                self.members.append(members)
                self.buckets.append(
                    Bucket(
                        [_carried(parameters[i], i in rowwise) for i in members],
                        [names[i] for i in members],
                        len(compressed),
                    )
                )
        pieces = zip(plan.pieces, parts_of, strict=True) if plan.pieces else ()
        self.pieces = [count for count, parts in pieces for _ in parts]
        self.gather_order = [bucket for group in plan.gather_order for bucket in parts_of[group]]
        self.bucket_of = [-1] * len(names)
        for bucket, part in enumerate(self.members):
            for i in part:
                self.bucket_of[i] = bucket
        self.unplanned = [i for i, bucket in enumerate(self.bucket_of) if bucket < 0]
        self.carried = {
            name: _carried(parameters[i], i in rowwise)
            for i, name in enumerate(names)
            if self.bucket_of[i] >= 0
        }


def _carried(parameter: nn.Parameter, flag_only: bool) -> Tensor:
    return parameter.detach()[:0] if flag_only else parameter


def split_by_storage(keys: Sequence[Key], parameters: Any) -> list[list[Key]]:
    """Split `keys` by what cannot lie in one buffer: dtype and device of `parameters[key]`."""
    parts: dict[tuple[torch.dtype, torch.device], list[Key]] = {}
    for key in keys:
        place = (parameters[key].dtype, parameters[key].device)
        parts.setdefault(place, []).append(key)
    return list(parts.values())


def unmeasured_profile(
    names: Sequence[str], parameters: Sequence[Tensor], trainable: Collection[str]
) -> ModelProfile:
    """Sizes without times, in the order in which backward is likely to produce gradients: the
    reverse of registration."""
    layers = tuple(
        LayerProfile(name, p.numel(), str(p.dtype).removeprefix("torch."), 0.0, tuple(p.shape))
        for name, p in zip(reversed(names), reversed(parameters), strict=True)
        if name in trainable
    )
    return ModelProfile("unmeasured", layers, forward_seconds=0.0)


def provisional_plan(
    names: Sequence[str], parameters: Sequence[nn.Parameter], trainable: Collection[str]
) -> MergePlan:
    """The plan before anything was measured: 25 MiB groups, as DistributedDataParallel has."""
    free = DenseCost(AlphaBeta(0.0, 0.0))
    return Threshold().plan(unmeasured_profile(names, parameters, trainable), free)


def adapted_plan(
    plan: MergePlan,
    names: Sequence[str],
    parameters: Sequence[nn.Parameter],
    trainable: Collection[str],
) -> MergePlan:
    """`plan` without the parameters that left, and with the new ones in groups behind it."""
    kept = [
        ([n for n in plan.names[start:stop] if n in trainable], density)
        for (start, stop), density in zip(plan.groups, plan.density_of_groups, strict=True)
    ]
    new = set(trainable) - set(plan.names)
    if new:
        added = provisional_plan(names, parameters, new)
        kept += [(list(added.names[start:stop]), None) for start, stop in added.groups]
    kept = [(group, density) for group, density in kept if group]
    bounds = accumulate((len(group) for group, _ in kept), initial=0)
    return MergePlan(
        tuple(name for group, _ in kept for name in group),
        tuple(pairwise(bounds)),
        plan.planner,
        tuple(density for _, density in kept) if plan.densities else (),
        compressor=plan.compressor,
    )
