"""`Session`: the exchange of one training, from its first step to what a checkpoint keeps of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_mgwfbp.engine.checkpoint import ExchangeState, check
from lightning_mgwfbp.engine.options import Settings, require_no_momentum
from lightning_mgwfbp.engine.reducer import Reducer
from lightning_mgwfbp.engine.warmup import WarmUp
from lightning_mgwfbp.exchange.methods import make_exchanger
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.plan import MergePlan


class Session:
    """A reducer, and the warm-up that makes its plans.

    Args:
        model: its name, for records.
        named_parameters: all of the model's.
        optimizers: those that will step them.
        transport: joins the ranks.
        settings: what the user chose.
        gradient_scale: says what gradients are multiplied by; None: by nothing.

    Raises:
        ValueError: no parameter is trainable, or an optimizer does not go with the compressor.
    """

    def __init__(
        self,
        model: str,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        optimizers: Iterable[Optimizer],
        transport: Transport,
        settings: Settings,
        gradient_scale: Callable[[], float] | None = None,
    ) -> None:
        for optimizer in optimizers:
            require_no_momentum(settings.compressor, optimizer)
        named = list(named_parameters)
        exchanger = make_exchanger(settings.compressor, transport)
        if gradient_scale is not None:
            exchanger.gradient_scale = gradient_scale
        compresses_none = not any(exchanger.compresses(p) for _, p in named)
        if exchanger.keeps_residuals and compresses_none and transport.rank == 0:
            warnings.warn(
                f"`compressor={settings.compressor!r}` has no effect: all of the model's parameters"
                " are too small for it, and travel exactly.",
                stacklevel=2,
            )
        self._shapes = {name: tuple(p.shape) for name, p in named}
        self._settings = settings
        self._transport = transport
        self.reducer = Reducer(named, exchanger, static_graph=settings.static_graph)
        self.warmup = WarmUp(model, named, transport, self.reducer, settings)

    @property
    def plan(self) -> MergePlan | None:
        """The plan in force, None during the warm-up."""
        return None if self.warmup.running else self.reducer.plan

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch it is, for schedules."""
        self.reducer.exchanger.epoch = epoch

    def state(self) -> ExchangeState:
        """What this rank has left behind, and what it depends on."""
        return ExchangeState(
            exchanger=self.reducer.exchanger.state_dict(),
            plan=self.plan,
            rowwise=self.reducer.rowwise,
            made_for=self._circumstances(),
        )

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Take up what `ExchangeState.gathered` gave, the same on all ranks.

        Its plan is installed if it was made in the same circumstances, and nothing is measured
        then: another plan would compress other groups, and the bits would differ.

        Raises:
            ValueError: it is damaged, or was saved for another model.
        """
        check(saved, self._shapes)
        self.reducer.expect_rowwise(saved["rowwise"])
        self.reducer.exchanger.load_state_dict(saved["exchanger"])
        if saved["plan"] is not None and saved["made_for"] == self._circumstances():
            plan = MergePlan.from_json(saved["plan"], "the merge plan in the checkpoint")
            self.warmup.resume(plan)

    def close(self) -> None:
        """Remove all hooks, and wait for what is still on its way."""
        self.warmup.stop()
        self.reducer.close()

    def _circumstances(self) -> dict[str, str]:
        return {
            "planner": repr(self._settings.planner),
            "compressor": repr(self._settings.compressor),
            "ranks": str(self._transport.world_size),
        }
