"""Error feedback: what was not sent is kept, and added to the next gradient.

Karimireddy et al., ICML'19; with a momentum, the momentum correction of Deep Gradient Compression
(Lin et al., ICLR'18, section 3.1): velocities are accumulated locally, and their sums are sent.

[Note: two phases] A step with a loss scale may turn out to have overflowed, and is then skipped by
all ranks. Its rests are therefore written aside, and take the place of the valid ones only when the
averages are known to be finite. Two flat buffers for each change their roles, so nothing is copied.

[Note: sitting out] A parameter without a gradient on this rank contributes nothing, and its rest
waits. Were it sent, a parameter that is used nowhere would be stepped.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_mgwfbp.exchange.buckets import Bucket, accumulation_dtype

Named = dict[str, Tensor]


class TwoPhase:
    """A flat tensor, zeros at first, whose next value is written aside before it becomes valid.

    Args:
        like: of its shape, dtype and device.
    """

    def __init__(self, like: Tensor) -> None:
        self.valid = torch.zeros_like(like)
        self._spare: Tensor | None = None
        self._next: Tensor | None = None

    @property
    def next(self) -> Tensor:
        """Where the next value is written; not initialised."""
        if self._next is None:
            self._next = torch.empty_like(self.valid) if self._spare is None else self._spare
        return self._next

    def conclude(self, is_right: bool) -> None:
        """Make the next value, if there is one, the valid one, or forget it."""
        if self._next is not None:
            used, self._next = self._next, None
            self.valid, self._spare = (used, self.valid) if is_right else (self.valid, used)


class Memory:
    """What the parameters of one bucket have left behind, in unscaled units.

    Held in float32 for narrower gradients, which would round small rests away. Takes twice the
    memory of the gradients, four times with a momentum; none before it is first needed.

    Args:
        bucket: whose rests these are.
        momentum: of the correction, in [0, 1); 0 for none.

    Attributes:
        names: of those who may leave something; a bucket's place for sparse gradients is empty.
    """

    def __init__(self, bucket: Bucket, momentum: float) -> None:
        self._bucket = bucket
        places = zip(bucket.names, bucket.parameters, strict=True)
        self.names = tuple(name for name, p in places if p.numel())
        self._momentum = momentum
        self._kinds: dict[str, TwoPhase] = {}
        self._is_flushed = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left behind."""
        return not self._kinds and not self._momentum

    def accumulate(self, factor: float) -> Tensor:
        """Return what this rank has to send, (numel,): rests plus `factor` times the gradients.

        Its parameters that sit out have zeros. To be changed in place into what is left behind;
        `settle` ends that.
        """
        gradient = self._bucket.data
        residual = self._kind("residual")
        if self._momentum:
            velocity = self._kind("velocity")
            torch.mul(velocity.valid, self._momentum, out=velocity.next)
            gradient = velocity.next.add_(gradient, alpha=factor)
            factor = 1.0
        torch.add(residual.valid, gradient, alpha=factor, out=residual.next)
        for _, chunk in self._sitting_out(residual):
            chunk.zero_()
        return residual.next

    @property
    def next_velocity(self) -> Tensor | None:
        """The velocities that `accumulate` has added to, (numel,)."""
        return self._kind("velocity").next if self._momentum else None

    def settle(self, *, is_flushed: bool = False) -> None:
        """Put back the residuals of parameters that sat out.

        Args:
            is_flushed: everything was sent; without momentum, nothing need be kept.
        """
        self._is_flushed = is_flushed and all(self._bucket.is_used_here) and not self._momentum
        for kind in self._kinds.values():
            for before, chunk in self._sitting_out(kind):
                chunk.copy_(before)

    def conclude(self, is_right: bool) -> None:
        """Make the residuals since the last time the valid ones, or forget them."""
        for kind in self._kinds.values():
            kind.conclude(is_right)
        if is_right and self._is_flushed:
            self._kinds.clear()
        self._is_flushed = False

    def named(self) -> dict[str, Named]:
        """Views of the valid rests, kind to parameter name to tensor of its shape."""
        return {kind: self._views(kind) for kind in self._kinds}

    def restore(self, kind: str, rests: Mapping[str, Tensor]) -> None:
        """Copy rests in, by parameter name; those of others are left alone.

        Raises:
            ValueError: one has another shape than its parameter.
        """
        mine = [name for name in self.names if name in rests]
        if not mine:
            return
        views = self._views(kind)
        for name in mine:
            if rests[name].shape != views[name].shape:
                raise ValueError(
                    f"The {kind} of {name!r} has shape {tuple(rests[name].shape)}, but the"
                    f" parameter {tuple(views[name].shape)}: it was saved for another model."
                )
            views[name].copy_(rests[name])

    def _views(self, kind: str) -> Named:
        views = self._bucket.as_gradients(self._kind(kind).valid)
        named = dict(zip(self._bucket.names, views, strict=True))
        return {name: named[name] for name in self.names}

    def _kind(self, kind: str) -> TwoPhase:
        if kind not in self._kinds:
            data = self._bucket.data
            wide = accumulation_dtype(data.dtype)
            self._kinds[kind] = TwoPhase(torch.empty_like(data, dtype=wide))
        return self._kinds[kind]

    def _sitting_out(self, kind: TwoPhase) -> list[tuple[Tensor, Tensor]]:
        used = self._bucket.is_used_here
        if all(used):
            return []
        before, after = self._bucket.chunks(kind.valid), self._bucket.chunks(kind.next)
        return [(b, a) for b, a, u in zip(before, after, used, strict=True) if not u]


class ErrorFeedback:
    """The memories of all buckets; follows parameters by name through every regrouping.

    Args:
        momentum: see `Memory`.
    """

    def __init__(self, momentum: float = 0.0) -> None:
        self._momentum = momentum
        self._memories: dict[Bucket, Memory] = {}
        self._absent: dict[str, Named] = {}  # kind to rests of parameters that no bucket has

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Spread what is kept over new buckets; what none of them has is kept for later ones."""
        kept = self._everything()
        self._memories = {bucket: Memory(bucket, self._momentum) for bucket in buckets}
        taken = {name for memory in self._memories.values() for name in memory.names}
        self._absent = {}
        for kind, rests in kept.items():
            for memory in self._memories.values():
                memory.restore(kind, rests)
            # clones: a view would keep the whole of an old buffer
            self._absent[kind] = {n: r.clone() for n, r in rests.items() if n not in taken}

    def forget(self, names: Collection[str]) -> None:
        """Drop what is kept of these parameters; to be adopted anew before the next exchange."""
        kept = self._everything()
        self._memories = {}
        self._absent = {
            kind: {name: rest for name, rest in rests.items() if name not in names}
            for kind, rests in kept.items()
        }

    def of(self, bucket: Bucket) -> Memory:
        """The memory of an adopted bucket."""
        return self._memories[bucket]

    def conclude(self, is_right: bool) -> None:
        """[Note: two phases] for all buckets."""
        for memory in self._memories.values():
            memory.conclude(is_right)

    def state_dict(self) -> dict[str, Named]:
        """Kind ("residual", "velocity") to parameter name to tensor of its shape, on the CPU."""
        everything = self._everything()
        return {
            kind: {name: rest.detach().to("cpu", copy=True) for name, rest in rests.items()}
            for kind, rests in everything.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take up what `state_dict` gave, in the place of what is kept; velocities only with a
        momentum, and of another method only what is called the same.

        Raises:
            ValueError: a tensor does not fit its parameter.
        """
        buckets = list(self._memories)
        kinds = ("residual", "velocity") if self._momentum else ("residual",)
        self._memories = {}
        self._absent = {kind: dict(state[kind]) for kind in kinds if kind in state}
        self.adopt(buckets)

    def _everything(self) -> dict[str, Named]:
        everything: dict[str, Named] = {"residual": {}}  # even where nothing is left behind
        for kind, rests in self._absent.items():
            everything.setdefault(kind, {}).update(rests)
        for memory in self._memories.values():
            for kind, rests in memory.named().items():
                everything.setdefault(kind, {}).update(rests)
        return everything


def own_or_mean(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> dict[str, Named]:
    """What rank `rank` takes over from a run of `len(states)` ranks.

    Its own state where the number is the same. Else the mean over the old ranks, everywhere: what
    is averaged is divided by the number of ranks, so (sum of new) / new P = (sum of old) / old P.
    """
    if len(states) == world_size:
        return {kind: dict(rests) for kind, rests in states[rank].items()}
    folded: dict[str, Named] = {}
    for state in states:
        for kind, rests in state.items():
            total = folded.setdefault(kind, {})
            for name, rest in rests.items():
                share = rest / len(states)
                total[name] = total[name] + share if name in total else share
    return folded
