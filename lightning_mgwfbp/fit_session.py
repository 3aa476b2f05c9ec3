"""Opens the session of a fit: what a Trainer has settled, in the words of the engine."""

from __future__ import annotations

from dataclasses import replace

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mgwfbp.engine.agreement import require_agreement
from lightning_mgwfbp.engine.named_buffers import NamedBuffers
from lightning_mgwfbp.engine.options import Options
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.engine.structure import Structure
from lightning_mgwfbp.exchange.methods import resolve_compressor
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.module_state import exchanged_parameters
from lightning_mgwfbp.plan.records import counted
from lightning_mgwfbp.schedules import agree_on_schedule
from lightning_mgwfbp.trainer_facts import training_facts


def open_session(
    trainer: pl.Trainer, transport: Transport, options: Options, buffers: NamedBuffers | None
) -> Session:
    """Return the session of a fit whose optimizers are set up. Collective.

    Args:
        buffers: those that ranks are given again and again, if any are.

    Raises:
        ValueError: something does not go with `options`.
        RuntimeError: the ranks differ.
    """
    module = trainer.lightning_module
    require_agreement(transport, training_facts(trainer, module))
    method = resolve_compressor(options.compressor)
    schedule = agree_on_schedule(trainer, options.schedule, method, transport)
    settings = replace(options, schedule=schedule).settle(transport)
    plugin = trainer.precision_plugin
    scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
    session = Session(
        type(module).__name__,
        Structure(
            exchanged_parameters(module),
            lambda: exchanged_parameters(module),
            lambda: trainer.optimizers,
            buffers,
        ),
        transport,
        settings,
        module,
        None if scaler is None else scaler.get_scale,
        leaves_averages=True,
    )
    _announce(session)
    return session


def _announce(session: Session) -> None:
    if session.reducer.exchanger.needs_whole_gradient:
        rank_zero_info(
            "local_clip_norm=... needs the whole gradient: every exchange begins when backward"
            " has ended, and nothing overlaps it."
        )
    if session.saved_plan is not None:
        groups = counted(len(session.saved_plan.groups), "merge group")
        rank_zero_info(f"{groups}, from a saved plan.")
