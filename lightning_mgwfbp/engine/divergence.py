"""`DivergenceWatch`: whether all ranks still hold the same weights, bit for bit.

Equal averages and equal updates keep ranks equal for ever, so whatever else changes weights on some
of them (noise of an optimizer's own, a callback that acts on rank 0, a step that one rank leaves
out, a fault of the memory) shows here, and is worth an error: nothing ever brings them together
again. Weights alone are compared: what an optimizer keeps lies in its own dtypes and on its own
devices, is no rank's to share (ZeRO), and shows in the weights one step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lightning_mgwfbp.engine.errors import exchange_errors
from lightning_mgwfbp.engine.fingerprint import fingerprint
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan.records import counted

T = TypeVar("T")

_MOST_VALUES_SHOWN = 4


class DivergenceWatch:
    """Compares all parameters before the first step, and after every n-th one.

    A rank that leaves a step out must not wait here for others that are somewhere else. So those
    compare that have just completed an exchange, which sees whether they are in step.

    What it costs is to read them, 25 ms of one core for 100 MB and tens of us for each parameter,
    and one message of a few bytes.

    Args:
        named_parameters: to be equal on all ranks.
        transport: joins the ranks.
        every_n_steps: n.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        transport: Transport,
        every_n_steps: int,
    ) -> None:
        self._named = named_parameters
        self._transport = transport
        self._every_n_steps = every_n_steps

    def is_due(self, steps: int) -> bool:
        """Whether to compare after so many steps."""
        return steps % self._every_n_steps == 0

    def compare(self, steps: int) -> None:
        """Collective: 8 bytes of each rank travel; those of each parameter only on a difference.

        Args:
            steps: how many have been taken.

        Raises:
            RuntimeError: on every rank alike, naming the first element that differs.
        """
        home = self._named[0][1].device
        prints = torch.stack([fingerprint(p).to(home) for _, p in self._named])  # (N,)
        if len(set(self._everyones(int(fingerprint(prints))))) == 1:
            return
        by_parameter = zip(*self._everyones(prints.tolist()), strict=True)  # (N,) of (ranks,)
        differing = [
            named
            for named, values in zip(self._named, by_parameter, strict=True)
            if len(set(values)) > 1
        ]
        name, parameter = differing[0]
        raise RuntimeError(
            f"The ranks' weights differ after {counted(steps, 'step')}:"
            f" {name!r}{self._first_difference(parameter.detach())};"
            f" {len(differing)} of {len(self._named)} parameters differ. Something changes them"
            " otherwise than by averaged gradients, on some ranks only: random numbers, `if rank =="
            " 0`, a step left out."
        )

    def _first_difference(self, parameter: Tensor) -> str:
        """Say at which index `parameter` first differs, and what it is there on each rank.

        Found by bisection: of a large parameter its fingerprints travel, in some thirty messages.
        """
        flat = parameter.reshape(-1)
        begin, end = 0, flat.numel()
        while end - begin > 1:
            middle = (begin + end) // 2
            if len(set(self._everyones(int(fingerprint(flat[begin:middle]))))) == 1:
                begin = middle
            else:
                end = middle
        place = [int(index) for index in np.unravel_index(begin, parameter.shape)]
        element = flat[begin]
        values = self._everyones((int(fingerprint(element)), repr(element.item())))
        return f"{place if place else ''} is {_values(values)}"

    def _everyones(self, mine: T) -> list[T]:
        with exchange_errors(self._transport.rank, "what stands for all weights"):
            return self._transport.all_gather_object(mine, key="divergence")


def _values(values: Sequence[tuple[int, str]]) -> str:
    """Say which ranks hold which of the values, (ranks,), each its bits and its text."""
    holders: dict[tuple[int, str], list[int]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(rank)
    said = [f"{text} on {_ranks(ranks)}" for (_, text), ranks in holders.items()]
    if len(said) > _MOST_VALUES_SHOWN:
        said[_MOST_VALUES_SHOWN:] = [f"{len(said) - _MOST_VALUES_SHOWN} more elsewhere"]
    return " and ".join(said)


def _ranks(ranks: Sequence[int]) -> str:
    """[0, 1, 2, 5] is "ranks 0-2, 5"."""
    together = groupby(enumerate(ranks), lambda counted: counted[1] - counted[0])
    runs = [[rank for _, rank in run] for _, run in together]
    said = (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(said)
