"""What all ranks of a Trainer must have in common beside the options of the strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_mgwfbp.engine.agreement import (
    buffer_facts,
    facts_of,
    optimizer_facts,
    parameter_facts,
    require_exchangeable,
)
from lightning_mgwfbp.module_state import (
    exchanged_parameters,
    named_exchanged_buffers,
    tied_parameters,
)

# They decide when there is a step, and what becomes of gradients before it; and when validation
# comes, for which buffers are exchanged. Not those for how many batches there are.
_ARGUMENTS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "check_val_every_n_epoch",
    "val_check_interval",
)


def model_facts(module: pl.LightningModule, *, with_buffers: bool) -> dict[str, str]:
    """Describe what of `module` is exchanged, and how it optimizes.

    Args:
        module: as it was set up on this rank.
        with_buffers: whether its buffers are, too.
    """
    facts = {
        "the LightningModule": type(module).__qualname__,
        "automatic_optimization": repr(module.automatic_optimization),
        **parameter_facts(exchanged_parameters(module)),
        **{
            f"parameter {name!r}": f"tied to {other!r}"
            for name, other in tied_parameters(module).items()
        },
    }
    if with_buffers:
        facts |= buffer_facts(named_exchanged_buffers(module))
    return facts


def require_exchangeable_model(module: pl.LightningModule, *, with_buffers: bool) -> None:
    """Refuse parameters and buffers that ranks cannot send each other, when `model_facts` agree.

    Raises:
        ValueError: on every rank alike, naming the first one and the way out.
    """
    require_exchangeable("Parameter", exchanged_parameters(module))
    if with_buffers:
        require_exchangeable("Buffer", named_exchanged_buffers(module))


def training_facts(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, str]:
    """Describe when and how `trainer` will step `module`; its optimizers are set up by now."""
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    given: dict[str, Any] = {f"Trainer({name}=...)": getattr(trainer, name) for name in _ARGUMENTS}
    given["Trainer(precision=...)"] = plugin.precision
    if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
        given["the state of the GradScaler"] = plugin.scaler.state_dict()
    schedulers: dict[str, Any] = {}
    for number, config in enumerate(strategy.lr_scheduler_configs):
        which = f"learning-rate scheduler {number}"
        schedulers[which] = type(config.scheduler)
        schedulers[f"{which}'s interval"] = config.interval
        schedulers[f"{which}'s frequency"] = config.frequency
        schedulers[f"{which}'s state"] = config.scheduler.state_dict()
    return {
        **_facts_of_all(given),
        **optimizer_facts(strategy.optimizers, exchanged_parameters(module)),
        **_facts_of_all(schedulers),
    }


def _facts_of_all(values: Mapping[str, Any]) -> dict[str, str]:
    return dict(fact for each in values.items() for fact in facts_of(*each))
