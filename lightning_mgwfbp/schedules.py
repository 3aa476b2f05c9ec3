"""Which schedule a Trainer gets: what does not go with deferred steps, and what would see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.engine.deferred_step import why_not_deferred
from lightning_mgwfbp.engine.first_use import has_unseen_code
from lightning_mgwfbp.engine.options import Schedule
from lightning_mgwfbp.exchange.methods import ExchangeMethod
from lightning_mgwfbp.exchange.transport import Transport

# Between backward and step, when gradients are still on their way.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
_MODULE_GRADIENT_HOOKS = (*_GRADIENT_HOOKS, "configure_gradient_clipping", "backward")
# Between a step and the next forward, when updates are. Those around epochs and validation are not
# among them: there WarmupCallback completes the step for everybody.
_WEIGHT_HOOKS = ("on_train_batch_end", "on_train_batch_start")
_MODULE_WEIGHT_HOOKS = (
    *_WEIGHT_HOOKS,
    "optimizer_step",
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
# Lightning's own that use some of those hooks, and look at no weights but by saving a checkpoint.
_BLIND = (
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateMonitor,
    callbacks.ModelCheckpoint,
    callbacks.RichProgressBar,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
    callbacks.TQDMProgressBar,
)


def agree_on_schedule(
    trainer: pl.Trainer,
    asked: Schedule | Literal["auto"],
    method: ExchangeMethod | None,
    transport: Transport,
) -> Schedule:
    """Settle what is asked for, the same on all ranks, each of which may know of an obstacle.

    Raises:
        ValueError: `asked` is "cross_iteration", and cannot work on some rank.
    """
    if asked == "backward":
        return "backward"
    mine = against_cross_iteration(trainer, method), what_would_see(trainer)
    obstacles, witnesses = zip(*transport.all_gather_object(mine, key="schedule"), strict=True)
    obstacle, witness = (next(filter(None, said), None) for said in (obstacles, witnesses))
    if obstacle is not None and asked == "cross_iteration":
        raise ValueError(
            f'`schedule="cross_iteration"` cannot work: {obstacle}. Use `schedule="backward"`'
            ' (`strategy="mgwfbp"`), or "auto", which falls back to it.'
        )
    if obstacle is None and witness is None:
        return "cross_iteration"
    said = f'The schedule is "backward": {obstacle or witness}.'
    if asked == "auto":
        rank_zero_info(said)
    else:
        rank_zero_warn(f'`schedule="cross_iteration"` has no effect. {said}')
    return "backward"


def against_cross_iteration(trainer: pl.Trainer, method: ExchangeMethod | None) -> str | None:
    """Say what `schedule="cross_iteration"` cannot work with, as the user typed it, if anything."""
    return next(_obstacles(trainer, method), None)


def _obstacles(trainer: pl.Trainer, method: ExchangeMethod | None) -> Iterator[str]:
    module, plugin = trainer.lightning_module, trainer.precision_plugin
    if trainer.gradient_clip_val:
        yield (
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` needs all averages before"
            " the first update"
        )
    scales_loss = isinstance(plugin, MixedPrecision) and plugin.scaler is not None
    if scales_loss:
        yield f"`Trainer(precision={plugin.precision!r})` scales the loss"
    if not module.automatic_optimization:
        yield f"{type(module).__name__} optimizes manually (`automatic_optimization=False`)"
    yield from why_not_deferred(trainer.optimizers, method, scales_loss=scales_loss)
    if is_overridden("optimizer_zero_grad", module):
        yield (
            f"`{type(module).__name__}.optimizer_zero_grad` may keep gradients, but after an update"
            " there are none"
        )
    yield from _overridden_gradient_hooks(trainer)


def _overridden_gradient_hooks(trainer: pl.Trainer) -> Iterator[str]:
    for who in (
        *_overridden(trainer.lightning_module, _MODULE_GRADIENT_HOOKS),
        *(
            name
            for callback in _callbacks(trainer)
            for name in _overridden(callback, _GRADIENT_HOOKS)
        ),
    ):
        yield f"{who} comes between backward and the update, when averages are still on their way"


def what_would_see(trainer: pl.Trainer) -> str | None:
    """Say what may see that updates are not complete right after a step; None: nothing."""
    module = trainer.lightning_module
    if has_unseen_code(module.modules()):
        return "compiled or scripted code uses weights unseen"
    watchers = [callback for callback in _callbacks(trainer) if type(callback) not in _BLIND]
    for callback in watchers:
        if not isinstance(callback, callbacks.StochasticWeightAveraging):
            continue
        if callback.pl_module_contains_batch_norm(module):
            return f"{type(callback).__name__} takes steps without backward, for BatchNorm"
    looking = _overridden(module, _MODULE_WEIGHT_HOOKS)
    looking += [name for callback in watchers for name in _overridden(callback, _WEIGHT_HOOKS)]
    return f"{looking[0]} may look at weights right after a step" if looking else None


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in given if not isinstance(callback, WarmupCallback)]


def _overridden(owner: pl.LightningModule | pl.Callback, hooks: Sequence[str]) -> list[str]:
    return [f"`{type(owner).__name__}.{hook}`" for hook in hooks if is_overridden(hook, owner)]
