"""`DivergenceWatch`: whether all ranks still hold the same weights, bit for bit.

Equal averages and equal updates keep ranks equal for ever, so whatever else changes weights on some
of them (noise of an optimizer's own, a callback that acts on rank 0, a step that one rank leaves
out, a fault of the memory) shows here. Nothing ever brings such ranks together again. Weights alone
are compared: what an optimizer keeps lies in its own dtypes and on its own devices, is no rank's to
share (ZeRO), and shows in the weights one step later.

[Note: bits] A sum over ranks is what every transport has. So the 64 bits of a fingerprint travel as
64 numbers 0 or 1, whose sums are all 0 or P if and only if all P ranks have the same bits (float32
counts exactly to 2^24). Every rank then knows the same.

[Note: exchanges] What is due is counted in exchanges, of which a step has one as a rule. The n-th
exchange of a rank meets the n-th of every other one, also where a rank has left out a step: so none
ever waits here for a message that another does not send.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.fingerprint import fingerprint_of_all
from lightning_mgwfbp.engine.weight_differences import (
    WHAT,
    differing_parts,
    everyones,
    first_difference,
    relative_differences,
)
from lightning_mgwfbp.engine.weight_slices import Part, slices_of
from lightning_mgwfbp.exchange.transport import Pending, Transport
from lightning_mgwfbp.plan.records import counted

# Of the root mean square: more than last bits that were rounded otherwise amount to in a training.
_TOLERANCE = 1e-3
_TOLERANCE_ULPS = 8

_ADVICE = (
    "`detect_divergence_every_n_steps=1` compares all weights after every step: it names the step"
    " after which they part."
)


@dataclass(frozen=True)
class Checks:
    """Which weights are compared when, and what of a difference is an error.

    Attributes:
        every_n_steps: one slice is due after so many steps: [Note: exchanges].
        slices: all weights are cut into so many, which take turns.
        is_strict: whether any difference of bits is an error, not only a large one.
    """

    every_n_steps: int
    slices: int = 1
    is_strict: bool = True


DEFAULT_CHECKS = Checks(50, slices=20, is_strict=False)


@dataclass(frozen=True)
class _Comparison:
    """One that was started."""

    parts: list[Part]
    before: str  # when they were last compared
    bits: Tensor  # (64,), later their sums over the ranks
    pending: Pending


class DivergenceWatch:
    """Compares parameters by a small message behind the buckets of an exchange that is due.

    It keeps nobody waiting: `start` when all buckets have been launched, `finish` when they have
    arrived. Only where a difference was seen is `compare` collective. It is called where all ranks
    come by in the same order, which `finish` need not be.

    A comparison costs one core 1 to 3 ns (on an idle machine, a busy one) for each number of the
    slice, some 5 us for each parameter in it, and 0.1 ms; on GPUs two kernels are launched for each
    2^17 numbers. On the busy one that is by default a mean of 70 us per step for 100 MB of float32
    in 160 parameters, 7 us for 1,000 parameters of 64 numbers, and 2 us for the smallest model.
    Once last bits differ, each comparison costs a broadcast of the parts that do, and a pass over
    their parameters on rank 0.

    Args:
        named_parameters: to be equal on all ranks.
        transport: joins the ranks.
        checks: what is due when.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        transport: Transport,
        checks: Checks = DEFAULT_CHECKS,
    ) -> None:
        self._transport = transport
        self._checks = checks
        self._has_warned = False
        self._running: _Comparison | None = None
        self._differing: _Comparison | None = None
        self.set_parameters(named_parameters)

    def set_parameters(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Compare these from the next `start` on; the same on all ranks."""
        self._named = list(named_parameters)
        self._slices = slices_of(self._named, self._checks.slices)
        self._compared: set[int] = set()  # slices

    def start(self, exchanges: int) -> None:
        """Begin to compare the slice that is due in this exchange, if one is.

        Args:
            exchanges: how many there were before, the same on all ranks.
        """
        turn, later = divmod(exchanges, self._checks.every_n_steps)
        if later or not self._slices:
            return
        number = turn % len(self._slices)
        parts = self._slices[number]
        # gradients travel where trainable parameters lie
        home = next((p.device for _, p in self._named if p.requires_grad), torch.device("cpu"))
        bits = _spread(fingerprint_of_all([part.numbers() for part in parts], home))
        with exchange_errors(self._transport.rank, WHAT):
            pending = self._transport.all_reduce(bits, key="weights")
        self._running = _Comparison(parts, self._when_before(number), bits, pending)
        self._compared.add(number)

    def finish(self) -> None:
        """Wait for what was started, and remember whether weights differ; reads the device then."""
        comparison, self._running = self._running, None
        if comparison is None:
            return
        with exchange_errors(self._transport.rank, WHAT):
            comparison.pending.wait()
            sums = comparison.bits.tolist()
        if any(0 < total < self._transport.world_size for total in sums):
            self._differing = comparison

    def compare(self, steps: int) -> None:
        """Say what differs, if `finish` has seen a difference since the last call. Collective then.

        Args:
            steps: how many this rank has taken.

        Warns:
            UserWarning: last bits differ; once, on rank 0.

        Raises:
            RuntimeError: on every rank alike, naming an element that differs, and what it is on
                which ranks; or ranks have taken unequally many steps.
        """
        comparison, self._differing = self._differing, None
        if comparison is None:
            return
        self._require_equal(steps)
        # none, where weights have become equal again under way
        parts = differing_parts(comparison.parts, self._transport)
        if not parts:
            return
        if self._checks.is_strict:
            raise RuntimeError(self._error(steps, parts[0], len(parts)))
        sizes = relative_differences(parts, self._transport)
        excess = [
            s / _tolerance(part.parameter.dtype) for s, part in zip(sizes, parts, strict=True)
        ]
        worst = excess.index(max(excess))
        if excess[worst] > 1:
            (everything,) = slices_of(self._named, 1)
            count = len(differing_parts(everything, self._transport))
            error = self._error(steps, parts[worst], count)
            size = _size(sizes[worst], parts[worst])
            raise RuntimeError(f"{error} {size} {comparison.before} {_ADVICE}")
        self._warn(steps, parts[worst], sizes[worst])

    def _when_before(self, number: int) -> str:
        slice_ = f"This slice of the weights, number {number + 1} of {len(self._slices)},"
        if number not in self._compared:
            return f"{slice_} had not been compared before."
        period = self._checks.every_n_steps * len(self._slices)
        return f"{slice_} had last been compared {period} steps before."

    def _require_equal(self, steps: int) -> None:
        """Ranks out of step, whose tails nobody has read, have other weights, too."""
        everyone = everyones(steps, self._transport)
        if len(set(everyone)) > 1:
            fewest, most = min(everyone), max(everyone)
            raise RuntimeError(
                f"The ranks are out of step: rank {everyone.index(fewest)} has taken"
                f" {counted(fewest, 'step')}, rank {everyone.index(most)} {most}. Every rank must"
                " call backward, synchronize and step alike."
            )

    def _error(self, steps: int, part: Part, count: int) -> str:
        if steps == 0:
            return (
                "The ranks' weights differ before the first step:"
                f" {first_difference(part, self._transport)}; {count} of {len(self._named)}"
                " parameters differ. Either they began so (`broadcast_parameters(...)` before"
                " MergedOptimizer gives all ranks rank 0's, as does leaving out `init_sync=False`),"
                " or something has changed them since, on some ranks only."
            )
        return (
            f"The ranks' weights differ after {counted(steps, 'step')}:"
            f" {first_difference(part, self._transport)};"
            f" {count} of {len(self._named)} parameters differ. Something changes them otherwise"
            " than by averaged gradients, on some ranks only: random numbers, `if rank == 0`, a"
            " step left out."
        )

    def _warn(self, steps: int, part: Part, size: float) -> None:
        if self._has_warned or self._transport.rank != 0:
            return
        self._has_warned = True
        warnings.warn(
            f"The ranks' weights differ in their last bits after {counted(steps, 'step')}: by"
            f" {size:.2g} of the root mean square of {part.name!r} at most. So do those of ranks"
            " whose processors are of different kinds, or that began with different weights"
            " (`init_sync=False`). Training goes on; a difference above"
            f" {_tolerance(part.parameter.dtype):.2g} will end it.",
            stacklevel=2,
        )


def _spread(print_: Tensor) -> Tensor:
    """The bits of int64, (), as numbers 0 and 1, (64,): [Note: bits]."""
    places = torch.arange(64, device=print_.device)
    return ((print_ >> places) & 1).to(torch.float32)


def _tolerance(dtype: torch.dtype) -> float:
    """What is a difference of last bits, as `relative_differences` has it."""
    is_rounded = dtype.is_floating_point or dtype.is_complex
    return max(_TOLERANCE, _TOLERANCE_ULPS * torch.finfo(dtype).eps if is_rounded else 0.0)


def _size(size: float, part: Part) -> str:
    if size == math.inf:
        return "No rounding explains the difference."
    return (
        f"The difference is up to {size:.2g} of the root mean square of {part.name!r}; rounding"
        f" explains {_tolerance(part.parameter.dtype):.2g}."
    )
