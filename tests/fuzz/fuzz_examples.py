"""Random models, trainings and ways to exchange, drawn in one process and run on many ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from lightning_mgwfbp import AlphaBeta, TopK
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import MergePlan

Seen = list[Tensor | None]
TOP_ALL = TopK(1.0, dense_below_numel=1)  # sends everything
SHAPES = ((), (0,), (1,), (3,), (0, 3), (2, 3), (7, 5), (2, 3, 2, 2), (300,))
OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.25),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.125, momentum=0.5),
    "adamw": lambda parameters: optim.AdamW(parameters, lr=0.01),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Spec:
    """One parameter."""

    shape: tuple[int, ...]
    dtype: str
    is_sparse: bool  # its gradients are, being an embedding's


@dataclass(frozen=True)
class MicroBatch:
    used: tuple[tuple[int, ...], ...]  # (ranks,): parameters in the order of the forward
    no_sync: bool
    synchronizes: bool  # afterwards, as a strategy does after each backward


@dataclass(frozen=True)
class Step:
    micro_batches: tuple[MicroBatch, ...]
    zero_grad: str  # "to none", "to zero" or "keep", before them
    frozen: frozenset[int]
    clips: bool
    is_taken: bool
    is_looked_at: bool


@dataclass(frozen=True)
class Case:
    world_size: int
    specs: tuple[Spec, ...]
    optimizer: str
    steps: tuple[Step, ...]
    plan: MergePlan | str  # of the parameters that are trainable in the first step
    compressor: TopK | str | None
    schedule: str
    static_graph: bool
    replan_every_n_steps: int | None


class Fuzzed(nn.Module):
    """Parameters as specified, and a loss of any of them, in any order.

    Args:
        bends: whether gradients depend on weights; otherwise they are whole numbers, the same ones
            for all weights.
    """

    def __init__(self, case: Case, *, bends: bool) -> None:
        super().__init__()
        self._case, self._bends = case, bends
        generator = torch.Generator().manual_seed(len(case.specs))
        for i, spec in enumerate(case.specs):
            data = whole_numbers(spec, generator)
            if len(spec.shape) == 4:
                data = data.contiguous(memory_format=torch.channels_last)
            if spec.is_sparse:
                setattr(self, f"p{i}", nn.Embedding.from_pretrained(data, sparse=True))
            else:
                setattr(self, f"p{i}", nn.Parameter(data))
        self.tied = self.p0

    def forward(self, used: Sequence[int], *seeds: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(s * 97**n for n, s in enumerate(seeds)))
        terms = [self._term(i, generator) for i in used]
        return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)

    def freeze(self, frozen: frozenset[int]) -> None:
        for i in range(len(self._case.specs)):
            getattr(self, f"p{i}").requires_grad_(i not in frozen)

    def _term(self, i: int, generator: torch.Generator) -> Tensor:
        spec, parameter = self._case.specs[i], getattr(self, f"p{i}")
        if spec.is_sparse:
            rows = torch.randint(spec.shape[0], (2,), generator=generator)
            spec = replace(spec, shape=(2, *spec.shape[1:]))
            parameter = parameter(rows)
        # of a complex product the real part; the gradient is the conjugate of what it is with
        factor = whole_numbers(spec, generator).conj()
        if self._bends:
            return (parameter * factor / 4).tanh().square().sum().double()
        # a multiple of the number of ranks, so that the mean is whole, too
        return (parameter * (factor * self._case.world_size)).sum().real.double()


def names_of(specs: Sequence[Spec], which: Iterable[int]) -> list[str]:
    return [f"p{i}.weight" if specs[i].is_sparse else f"p{i}" for i in which]


def whole_numbers(spec: Spec, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    numbers = torch.randint(-2, 3, (2, *spec.shape), generator=generator)
    if dtype.is_complex:
        return torch.complex(*numbers.float()).to(dtype)
    return numbers[0].to(dtype)


class Trainee:
    """A model on one rank and what steps it; what it saw is kept, to be compared."""

    def __init__(self, case: Case, model: Fuzzed, optimizer: Any, wrapper: Any) -> None:
        self.case, self.model, self.optimizer, self.wrapper = case, model, optimizer, wrapper
        self.seen: Seen = []

    def run(self, rank: int) -> Seen:
        for s, step in enumerate(self.case.steps):
            self.model.freeze(step.frozen)
            if step.zero_grad != "keep":
                self.optimizer.zero_grad(set_to_none=step.zero_grad == "to none")
            for m, micro in enumerate(step.micro_batches):
                with self.wrapper.no_sync() if micro.no_sync else nullcontext():
                    loss = self.wrapper(micro.used[rank], rank, s, m)
                    self.seen.append(loss.detach())
                    if loss.requires_grad:
                        loss.backward()
                if micro.synchronizes:
                    self.wrapper.synchronize()
            if step.clips:
                self.wrapper.synchronize()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if step.is_taken:
                self.optimizer.step()
            if step.is_looked_at:
                self.look(with_gradients=step.is_taken)
        self.look(with_gradients=False)
        return self.seen

    def look(self, *, with_gradients: bool) -> None:
        self.wrapper.flush()
        parameters = list(self.model.parameters())
        self.seen += [p.detach().clone() for p in parameters]
        if with_gradients and self.case.schedule == "backward":
            self.seen += [None if p.grad is None else strided(p.grad) for p in parameters]


class Merged:
    """What the training loop asks of a wrapper, asked of a MergedOptimizer."""

    def __init__(self, case: Case, model: Fuzzed, transport: Transport | None) -> None:
        model.freeze(case.steps[0].frozen)
        self.model = model
        self.optimizer = MergedOptimizer(
            OPTIMIZERS[case.optimizer](model.parameters()),
            model.named_parameters(),
            transport=transport,
            planner=case.plan,
            compressor=case.compressor,
            schedule=case.schedule,
            module=model,
            static_graph=case.static_graph,
            link=AlphaBeta(1e-4, 1e-8),
            warmup_steps=1,
            replan_every_n_steps=case.replan_every_n_steps,
        )
        self.no_sync = self.optimizer.no_sync
        self.synchronize = self.optimizer.synchronize
        self.flush = self.optimizer.flush

    def __call__(self, *args: Any) -> Tensor:
        return self.model(*args)


def train_merged(case: Case, rank: int, transport: Transport | None, *, bends: bool) -> Seen:
    model = Fuzzed(case, bends=bends)
    merged = Merged(case, model, transport)
    try:
        return Trainee(case, model, merged.optimizer, merged).run(rank)
    finally:
        merged.optimizer.close()


def assert_seen_alike(ours: Seen, theirs: Seen) -> None:
    """The same numbers at the same places; NaN is NaN."""
    assert len(ours) == len(theirs)
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        if mine is None or other is None:
            assert mine is other, f"number {place}: {mine} but {other}"
        else:
            assert mine.dtype == other.dtype, f"number {place}"
            assert mine.shape == other.shape, f"number {place}"
            same = (mine == other) | (mine.isnan() & other.isnan())
            assert same.all(), f"number {place}: {mine} but {other}"


def fits(compressor: TopK | str | None, kinds: Sequence[Spec]) -> bool:
    """Whether it has an effect."""
    return compressor != TOP_ALL or any(0 not in kind.shape for kind in kinds)


def strided(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient.clone()


def specs(*dtypes: str) -> st.SearchStrategy[Spec]:
    kinds = st.sampled_from(dtypes)
    wide = st.sampled_from(("float32", "float64"))  # torch cannot add others, where sparse
    rowwise = st.builds(Spec, st.sampled_from(((4, 3), (9, 1))), wide, st.just(True))
    usual = st.builds(Spec, st.sampled_from(SHAPES), kinds, st.just(False))
    return st.one_of(usual, usual, usual, rowwise)


@st.composite
def plans(draw: st.DrawFn, names: Sequence[str], compressor: TopK | str | None) -> MergePlan | str:
    """Any partition of the names, in any order, or a planner."""
    if compressor != TOP_ALL and draw(st.integers(0, 2)) == 0:  # whose selections would be timed
        return draw(st.sampled_from(("optimal", "wfbp", "single")))
    cuts = draw(st.sets(st.integers(1, len(names) - 1))) if len(names) > 1 else set()
    groups = tuple(pairwise([0, *sorted(cuts), len(names)]))
    return MergePlan(tuple(draw(st.permutations(names))), groups)
