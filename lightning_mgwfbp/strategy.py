"""`MGWFBPStrategy`: Lightning's DDPStrategy with merged, planned gradient exchange in DDP's place.

The model is not wrapped, so that checkpoints, hooks and callbacks see what they see without a
strategy; what DistributedDataParallel does around a forward and a backward is done here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

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
from lightning_mgwfbp.checkpoint_file import WholeCheckpointIO
from lightning_mgwfbp.ddp_arguments import check_ddp_arguments, take_comm_hook
from lightning_mgwfbp.engine.agreement import require_agreement, require_success, version_facts
from lightning_mgwfbp.engine.averaged_step import AveragedStep
from lightning_mgwfbp.engine.checkpoint import STATE, ExchangeState
from lightning_mgwfbp.engine.deferred_step import DeferredStep
from lightning_mgwfbp.engine.errors import explain, require_presence
from lightning_mgwfbp.engine.options import Options, Schedule
from lightning_mgwfbp.engine.session import Session
from lightning_mgwfbp.engine.warmup import Tuned
from lightning_mgwfbp.exchange.broadcast import broadcast_tensors
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.methods import ExchangeMethod, resolve_compressor
from lightning_mgwfbp.exchange.roll_call import RollCall
from lightning_mgwfbp.exchange.torch_transport import TorchTransport
from lightning_mgwfbp.exchange.transport import Transport
from lightning_mgwfbp.horovod_environment import HorovodEnvironment
from lightning_mgwfbp.launching import ScriptLauncher
from lightning_mgwfbp.module_state import (
    BufferRefresher,
    exchanged_buffers,
    exchanged_parameters,
)
from lightning_mgwfbp.plan import AlphaBeta, MergePlan, ModelProfile, Planner
from lightning_mgwfbp.plan.records import counted
from lightning_mgwfbp.preemption import Preemption
from lightning_mgwfbp.schedules import agree_on_schedule
from lightning_mgwfbp.trainer_facts import model_facts, training_facts
from lightning_mgwfbp.uneven_inputs import OnUneven, UnevenInputs, require_joinable

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
        detect_divergence_every_n_steps: compare the bits of all ranks' weights after so many steps,
            and end in an error that names what differs.
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
        uneven_inputs: what becomes of ranks that have fewer training batches than others: "error":
            all end with an error; "join": they stand by, contributing nothing, until all are done.
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
        detect_divergence_every_n_steps: int | None = None,
        profile: ModelProfile | str | None = None,
        link: AlphaBeta | str | None = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool | None = None,
        init_sync: bool = True,
        static_graph: bool = False,
        schedule: Schedule | Literal["auto"] = "backward",
        uneven_inputs: OnUneven = "error",
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
        if uneven_inputs not in get_args(OnUneven):
            raise ValueError(
                f"`MGWFBPStrategy(uneven_inputs=...)` must be one of"
                f" {', '.join(get_args(OnUneven))}, got {uneven_inputs!r}."
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
            detect_divergence_every_n_steps=detect_divergence_every_n_steps,
            profile=profile,
            link=link,
            static_graph=static_graph,
            schedule=schedule,
        )
        given = [b for b in (broadcast_buffers, forward_sync_buffers) if b is not None]
        self._broadcast_buffers = all(given)
        self._init_sync = init_sync
        self._on_uneven = uneven_inputs
        self._carrier = transport
        self._buffers: BufferRefresher | None = None
        self._transport: Transport | None = None
        self._steps: dict[int, AveragedStep | DeferredStep] = {}
        self._last_state: ExchangeState | None = None
        self._last_batch_at = 0.0
        self.session: Session | None = None  # while fitting on several ranks
        self.inputs: UnevenInputs | None = None  # likewise
        self.preemption: Preemption | None = None  # likewise
        self.tuned: Tuned | None = None
        self.measured_exposed_seconds: float | None = None

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = ScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    @override
    def setup_environment(self) -> None:
        if self.root_device.type == "mps":
            raise ValueError(
                f"`Trainer(strategy={self.strategy_name!r}, accelerator='mps')` cannot work: MPS"
                " has no collectives. Use accelerator='cpu', or devices=1 without a strategy."
            )
        if self._checkpoint_io is None:  # no sooner: Lightning takes it for the user's choice
            self._checkpoint_io = WholeCheckpointIO()
        super().setup_environment()

    @override
    def configure_ddp(self) -> None:
        """Takes the place of the wrapping in DDP: the ranks compare, then rank 0's state wins."""
        if self.world_size == 1:
            rank_zero_info(f"strategy {self.strategy_name!r}: one process, nothing to exchange.")
            return
        module = self.lightning_module
        assert module is not None
        # over Lightning's own group: who disagrees on the transport opens another one, or none
        require_agreement(TorchTransport.world(), self._facts(module))
        transport = self._transport = self._open_transport()
        self.inputs = UnevenInputs(module.trainer, transport, self._on_uneven, self._timeout)
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
        self._last_batch_at = 0.0
        callback = WarmupCallback.of(trainer)
        callback.attach(self)
        module = self.lightning_module
        if self._transport is None or module is None:
            return  # one process
        if self._on_uneven == "join":
            require_joinable(trainer)
        require_agreement(self._transport, training_facts(trainer, module))
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
        roll = RollCall.present()
        self.preemption = None if roll is None else Preemption(trainer, roll)
        step = super().optimizer_step
        self._steps = {id(o): self.session.step_of(o, step) for o in self.optimizers}
        if self.session.reducer.exchanger.needs_whole_gradient:
            rank_zero_info(
                "local_clip_norm=... needs the whole gradient: every exchange begins when backward"
                " has ended, and nothing overlaps it."
            )
        if isinstance(settings.planner, MergePlan):
            groups = counted(len(settings.planner.groups), "merge group")
            rank_zero_info(f"{groups}, from a saved plan.")
            callback.warn_that_nothing_is_saved()
        tuned = self.session.warmup.start()
        if tuned is not None:
            callback.on_plan(trainer, tuned)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        session, inputs = self.session, self.inputs
        if session is None or inputs is None:
            return super().training_step(*args, **kwargs)
        self._look_for_missing_ranks()
        if self._buffers is not None:
            self._buffers.before_forward(goes_stale=session.reducer.syncing)
        output: STEP_OUTPUT
        with session.forward(), inputs.training_step():
            if inputs.stands_by:
                output = inputs.zero_loss()
            else:
                output = super().training_step(*args, **kwargs)
        if self._buffers is not None:
            self._buffers.after_forward(inputs.present[0])
        session.set_contributors(inputs.contributors)
        return output

    def _look_for_missing_ranks(self) -> None:
        """Before each batch Lightning broadcasts whether to stop, and takes a failure for a no: the
        exchange that follows would wait for the missing rank once more."""
        before, self._last_batch_at = self._last_batch_at, time.monotonic()
        timeout = default_pg_timeout if self._timeout is None else self._timeout
        if before and self._last_batch_at - before > timeout.total_seconds():
            require_presence()

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return dataloader if self.inputs is None else self.inputs.evened(dataloader)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self.inputs is not None:
            self.inputs.require_outside("`self.log(..., sync_dist=True, on_step=True)`")
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self.inputs is not None:
            self.inputs.require_outside("`self.all_gather(...)`")
        return super().all_gather(tensor, group, sync_grads)

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
        with nullcontext() if self.session is None else self.session.backward():
            plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
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
                checkpoint.update({} if gathered is None else {STATE: gathered})
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Each rank reads; where one cannot, it is every rank's ValueError."""
        if self.world_size == 1:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        checkpoint, failure = None, None
        try:
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        except Exception as error:  # whatever a damaged file leads to
            said = f"{type(error).__name__}: {error}"
            failure = ValueError(f"the checkpoint '{checkpoint_path}' cannot be read: {said}")
            failure.__cause__ = error
        require_success(TorchTransport.world(), failure)
        return checkpoint

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self.session is not None and self.session.reducer.exchanger.keeps_residuals:
            self.session.resume(checkpoint.get(STATE))
        elif STATE in checkpoint:
            rank_zero_info(
                "This run has no use for the residuals in the checkpoint: they are lost."
            )

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain(exception)

    @override
    def teardown(self) -> None:
        if self.session is not None:
            self.measured_exposed_seconds = self.session.reducer.exposed_seconds
        try:
            if self.session is not None:
                self._last_state = self.session.state()  # for trainer.save_checkpoint after fit
                self.session.close()
        finally:
            if self.inputs is not None:
                self.inputs.close()
            if self._transport is not None:
                self._transport.close()
            self._steps.clear()
            self._transport = self._buffers = self.session = self.inputs = self.preemption = None
            super().teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, arguments in _NAMES.items():
            what = f"Merged, planned gradient exchange with {arguments}"
            strategy_registry.register(name, cls, description=what, override=True, **arguments)

    def _facts(self, module: pl.LightningModule) -> dict[str, str]:
        return {
            **version_facts(),
            **self._options.facts(),
            "broadcast_buffers": repr(self._broadcast_buffers),
            "init_sync": repr(self._init_sync),
            "uneven_inputs": repr(self._on_uneven),
            "transport": repr(self._carrier),
            **model_facts(module, with_buffers=self._init_sync or self._broadcast_buffers),
        }


MGWFBPStrategy.register_strategies(StrategyRegistry)
