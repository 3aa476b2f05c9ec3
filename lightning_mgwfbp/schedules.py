"""What of a Trainer does not go with deferred steps, and who would see that they are incomplete."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.engine.first_use import has_unseen_code
from lightning_mgwfbp.engine.grouped_step import why_not_in_parts
from lightning_mgwfbp.exchange.compressors import Cast
from lightning_mgwfbp.exchange.methods import ExchangeMethod

# Between backward and step, when gradients are still on their way.
_GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
# Between a step and the next forward, when updates are. Those around epochs and validation are not
# among them: there WarmupCallback completes the step for everybody.
_WEIGHT_HOOKS = ("on_train_batch_end", "on_train_batch_start")
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


def against_cross_iteration(trainer: pl.Trainer, compressor: ExchangeMethod | None) -> str | None:
    """Say what stands against `schedule="cross_iteration"`, as the user typed it; None: nothing."""
    return next(_obstacles(trainer, compressor), None)


def _obstacles(trainer: pl.Trainer, compressor: ExchangeMethod | None) -> Iterator[str]:
    module = trainer.lightning_module
    if compressor is not None and not isinstance(compressor, Cast):
        yield f"`compressor={compressor!r}` does not send gradients by all-reduces"
    if trainer.gradient_clip_val:
        yield (
            f"`Trainer(gradient_clip_val={trainer.gradient_clip_val})` needs all averages before"
            " the first update"
        )
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        yield (
            f"`Trainer(precision={plugin.precision!r})` scales the loss, and must see all averages"
            " before the first update"
        )
    if not module.automatic_optimization:
        yield f"{type(module).__name__} optimizes manually (`automatic_optimization=False`)"
    if len(trainer.optimizers) != 1:
        yield f"{type(module).__name__} has {len(trainer.optimizers)} optimizers, not one"
    for optimizer in trainer.optimizers:
        if reason := why_not_in_parts(optimizer):
            yield reason
    if is_overridden("optimizer_zero_grad", module):
        yield (
            f"`{type(module).__name__}.optimizer_zero_grad` may keep gradients, but after an update"
            " there are none"
        )
    yield from _overridden_gradient_hooks(trainer)


def _overridden_gradient_hooks(trainer: pl.Trainer) -> Iterator[str]:
    for who in (
        *_overridden(trainer.lightning_module, (*_GRADIENT_HOOKS, "configure_gradient_clipping")),
        *(
            name
            for callback in _callbacks(trainer)
            for name in _overridden(callback, _GRADIENT_HOOKS)
        ),
    ):
        yield f"{who} comes between backward and the update, when averages are still on their way"


def who_looks_at_weights(trainer: pl.Trainer) -> str | None:
    """Say what may look at weights right after a step, or uses them unseen; None: nothing."""
    if has_unseen_code(trainer.lightning_module.modules()):
        return "Compiled or scripted code"
    watchers = [callback for callback in _callbacks(trainer) if type(callback) not in _BLIND]
    for callback in watchers:  # at the end it has steps made with gradients of before
        if isinstance(
            callback, callbacks.StochasticWeightAveraging
        ) and callback.pl_module_contains_batch_norm(trainer.lightning_module):
            return f"`{type(callback).__name__}` of a model with BatchNorm"
    looking = _overridden(trainer.lightning_module, ("optimizer_step", *_WEIGHT_HOOKS))
    looking += [name for callback in watchers for name in _overridden(callback, _WEIGHT_HOOKS)]
    return looking[0] if looking else None


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    given: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in given if not isinstance(callback, WarmupCallback)]


def _overridden(owner: pl.LightningModule | pl.Callback, hooks: Sequence[str]) -> list[str]:
    return [f"`{type(owner).__name__}.{hook}`" for hook in hooks if is_overridden(hook, owner)]
