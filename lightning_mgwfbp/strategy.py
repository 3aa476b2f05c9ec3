"""`MGWFBPStrategy`: Lightning's DDPStrategy with merged, planned gradient exchange in DDP's place.

The model is not wrapped, so that checkpoints, hooks and callbacks see what they see without a
strategy; what DistributedDataParallel does around a forward and a backward is done here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.ddp_arguments import check_ddp_arguments, take_comm_hook
from lightning_mgwfbp.engine.agreement import parameter_facts, require_agreement
from lightning_mgwfbp.engine.averaged_step import AveragedStep
from lightning_mgwfbp.engine.checkpoint import ExchangeState
from lightning_mgwfbp.engine.deferred_step import DeferredStep
from lightning_mgwfbp.engine.options import Options, Schedule
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.methods import ExchangeMethod, resolve_compressor
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.horovod_environment import HorovodEnvironment
from lightning_mgwfbp.module_state import (
    BufferRefresher,
    exchanged_buffers,
    exchanged_parameters,
)
from lightning_mgwfbp.plan import AlphaBeta, MergePlan, ModelProfile, Planner
from lightning_mgwfbp.schedules import agree_on_schedule

_NAMES: dict[str, dict[str, Any]] = {
    "mgwfbp": {"start_method": "popen"},
    "mgwfbp_spawn": {"start_method": "spawn"},
    "mgwfbp_fork": {"start_method": "fork"},
    "mgwfbp_notebook": {"start_method": "fork"},
    "mgwfbp_topk": {"start_method": "popen", "compressor": "topk"},
    "mgwfbp_cross_iteration": {"start_method": "popen", "schedule": "cross_iteration"},
    "mgwfbp_horovod": {"start_method": "popen", "transport": "horovod"},
}


_TRANSPORTS = ("auto", "torch", "horovod")
_STATE = "mgwfbp"  # key in a checkpoint


class MGWFBPStrategy(DDPStrategy):
    """Data-parallel training whose gradients are merged by a measured plan and exchanged while
    backward runs. Same results as `strategy="ddp"`.

    Args:
        planner: "auto", "optimal", "mgwfbp", "threshold", "wfbp", "single", a Planner, or the
            path of a saved plan, ending in .json.
        compressor: what travels: None for gradients as they are, "fp16" or "bf16" for a narrower
            type, "topk", "randomk" or "int8" for less with error feedback; or a Compressor,
            PowerSGD or DDPCommHook.
        warmup_steps: optimizer steps to profile before the plan is made; the first is not counted.
        replan_every_n_steps: profile and plan anew after so many steps.
        profile: a saved ModelProfile or its path, in the place of profiling.
        link: a saved AlphaBeta (seconds, seconds per byte) or its path, in the place of timing
            the network.
        broadcast_buffers: give all ranks rank 0's buffers before a forward, as DDP does.
        forward_sync_buffers: DDP's newer name for `broadcast_buffers`.
        init_sync: give all ranks rank 0's parameters and buffers at the start of fit.
        static_graph: a promise that every backward uses the same parameters equally often.
        schedule: "backward": gradients are averaged before the optimizer steps;
            "cross_iteration": each merge group is averaged and stepped only when the next forward
            needs it; "auto": that where nothing stands against it.
        transport: what carries gradients, "torch" (also "auto": torch.distributed) or "horovod",
            beside which torch.distributed carries Lightning's own traffic, over gloo.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method: as for DDPStrategy.
        ddp_arguments: every other argument of DDPStrategy and DistributedDataParallel; a Python
            ddp_comm_hook is run on the merge groups, the others are refused or warned about as
            `lightning_mgwfbp.ddp_arguments.TABLE` says.

    Raises:
        ValueError: an argument is out of range or cannot be honoured.
    """

    strategy_name = "mgwfbp"

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        *,
        planner: Literal["auto", "optimal", "mgwfbp", "threshold", "wfbp", "single"]
        | Planner
        | str = "auto",
        compressor: Literal["fp16", "bf16", "topk", "randomk", "int8"]
        | ExchangeMethod
        | None = None,
        warmup_steps: int = 5,
        replan_every_n_steps: int | None = None,
        profile: ModelProfile | str | None = None,
        link: AlphaBeta | str | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        static_graph: bool = False,
        schedule: Schedule | Literal["auto"] = "backward",
        transport: Literal["auto", "torch", "horovod"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **ddp_arguments: Any,
    ) -> None:
        hook = take_comm_hook(ddp_arguments)
        check_ddp_arguments(ddp_arguments)
        if hook is not None and compressor is not None:
            raise ValueError(
                f"`MGWFBPStrategy(ddp_comm_hook=..., compressor={compressor!r})` cannot work: both"
                " say how gradients travel. Leave one of them out."
            )
        if transport not in _TRANSPORTS:
            raise ValueError(
                f"`MGWFBPStrategy(transport=...)` must be one of {', '.join(_TRANSPORTS)},"
                f" got {transport!r}."
            )
        if transport == "horovod":
            load_horovod()  # or say now that it is missing
            process_group_backend = process_group_backend or "gloo"
            if cluster_environment is None and HorovodEnvironment.detect():
                cluster_environment = HorovodEnvironment()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self._options = Options(
            planner=planner,
            compressor=hook or compressor,
            warmup_steps=warmup_steps,
            replan_every_n_steps=replan_every_n_steps,
            profile=profile,
            link=link,
            static_graph=static_graph,
            schedule=schedule,
        )
        given = [b for b in (broadcast_buffers, forward_sync_buffers) if b is not None]
        self._broadcast_buffers = all(given)
        self._init_sync = init_sync
        self._carrier = transport
        self._buffers: BufferRefresher | None = None
        self._transport: Transport | None = None
        self._steps: dict[int, AveragedStep | DeferredStep] = {}
        self._last_state: ExchangeState | None = None
        self.session: Session | None = None  # while fitting on several ranks
        self.tuned: Tuned | None = None
        self.measured_exposed_seconds: float | None = None

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "mps":
            raise ValueError(
                f"`Trainer(strategy={self.strategy_name!r}, accelerator='mps')` cannot work: MPS"
                " has no collectives. Use accelerator='cpu', or devices=1 without a strategy."
            )
        super().setup_environment()

    @override
    def configure_ddp(self) -> None:
        """Takes the place of the wrapping in DDP: the ranks compare, then rank 0's state wins."""
        if self.world_size == 1:
            rank_zero_info(f"strategy {self.strategy_name!r}: one process, nothing to exchange.")
            return
        module = self.lightning_module
        assert module is not None
        transport = self._transport = self._open_transport()
        require_agreement(transport, self._facts(module))
        if self._init_sync:
            parameters = [p for _, p in exchanged_parameters(module)]
            broadcast_tensors(parameters + exchanged_buffers(module), 0, transport)
        if self._broadcast_buffers:
            self._buffers = BufferRefresher(module, transport)

    def _open_transport(self) -> Transport:
        if self._carrier != "horovod":
            return TorchTransport(timeout=self._timeout)
        timeout = default_pg_timeout if self._timeout is None else self._timeout
        return HorovodTransport.over(TorchTransport.world(), timeout)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._last_state = None
        callback = WarmupCallback.of(trainer)
        callback.attach(self)
        module = self.lightning_module
        if self._transport is None or module is None:
            return  # one process
        schedule = agree_on_schedule(
            trainer,
            self._options.schedule,
            resolve_compressor(self._options.compressor),
            self._transport,
        )
        settings = replace(self._options, schedule=schedule).settle(self._transport)
        plugin = self.precision_plugin
        scaler = plugin.scaler if isinstance(plugin, MixedPrecision) else None
        self.session = Session(
            type(module).__name__,
            exchanged_parameters(module),
            self.optimizers,
            self._transport,
            settings,
            module,
            None if scaler is None else scaler.get_scale,
        )
        step = super().optimizer_step
        self._steps = {id(o): self.session.step_of(o, step) for o in self.optimizers}
        if self.session.reducer.exchanger.needs_whole_gradient:
            rank_zero_info(
                "local_clip_norm=... needs the whole gradient: every exchange begins when backward"
                " has ended, and nothing overlaps it."
            )
        if isinstance(settings.planner, MergePlan):
            rank_zero_info(f"{len(settings.planner.groups)} merge groups, from a saved plan.")
            callback.warn_that_nothing_is_saved()
        tuned = self.session.warmup.start()
        if tuned is not None:
            callback.on_plan(trainer, tuned)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._buffers is not None and self.session is not None:
            self._buffers.before_forward(goes_stale=self.session.reducer.syncing)
        with nullcontext() if self.session is None else self.session.forward():
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._buffers is not None:
            self._buffers.before_forward(goes_stale=False)
        return super().validation_step(*args, **kwargs)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # the base class's, with averages in place before `on_after_backward` runs
        module, plugin = self.lightning_module, self.precision_plugin
        assert module is not None
        self.pre_backward(closure_loss)
        closure_loss = plugin.pre_backward(closure_loss, module)
        plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.session is not None:
            self.session.backward_ended()
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        step = self._steps.get(id(optimizer))
        if step is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        return step(closure, model=model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        if self.session is None:
            yield
        else:
            with self.session.reducer.no_sync():
                yield

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self.session is not None:
            self.session.flush()  # also where the module's own state_dict() calls no hooks
        return super().lightning_module_state_dict()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        if "optimizer_states" in checkpoint:  # not one of weights only
            state = self._last_state if self.session is None else self.session.state()
            if state is not None:
                gathered = state.gathered(self._transport or TorchTransport.world())
                checkpoint.update({} if gathered is None else {_STATE: gathered})
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if _STATE not in checkpoint:
            return
        if self.session is None or not self.session.reducer.exchanger.keeps_residuals:
            rank_zero_info(
                "This run has no use for the residuals in the checkpoint: they are lost."
            )
        else:
            self.session.resume(checkpoint[_STATE])

    @override
    def teardown(self) -> None:
        if self.session is not None:
            self.measured_exposed_seconds = self.session.reducer.exposed_seconds
        try:
            if self.session is not None:
                self._last_state = self.session.state()  # for trainer.save_checkpoint after fit
                self.session.close()
        finally:
            if self._transport is not None:
                self._transport.close()
            self._steps.clear()
            self._transport = self._buffers = self.session = None
            super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, arguments in _NAMES.items():
            what = f"Merged, planned gradient exchange with {arguments}"
            strategy_registry.register(name, cls, description=what, override=True, **arguments)

    def _facts(self, module: pl.LightningModule) -> dict[str, str]:
        return {
            "the version of lightning-mgwfbp": version("lightning-mgwfbp"),
            **self._options.facts(),
            "broadcast_buffers": repr(self._broadcast_buffers),
            "init_sync": repr(self._init_sync),
            "transport": repr(self._carrier),
            **parameter_facts(exchanged_parameters(module)),
        }


MGWFBPStrategy.register_strategies(StrategyRegistry)
