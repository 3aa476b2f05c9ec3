"""`MGWFBPStrategy`: what a user may choose, and the names in Lightning's registry."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import STRATEGY_REGISTRY as FABRIC_REGISTRY
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mgwfbp.checkpoint_file import WholeCheckpointIO
from lightning_mgwfbp.ddp_arguments import check_ddp_arguments, take_comm_hook
from lightning_mgwfbp.engine.options import Options, Schedule
from lightning_mgwfbp.exchange.horovod_rendezvous import load_horovod
from lightning_mgwfbp.exchange.methods import ExchangeMethod
from lightning_mgwfbp.exchanging import ExchangingStrategy
from lightning_mgwfbp.horovod_environment import HorovodEnvironment
from lightning_mgwfbp.joined_ranks import Carrier, JoinOptions
from lightning_mgwfbp.launching import ScriptLauncher
from lightning_mgwfbp.plan import AlphaBeta, ModelProfile, Planner
from lightning_mgwfbp.uneven_inputs import OnUneven

_NAMES: dict[str, dict[str, Any]] = {
    "mgwfbp": {"start_method": "popen"},
    "mgwfbp_spawn": {"start_method": "spawn"},
    "mgwfbp_fork": {"start_method": "fork"},
    "mgwfbp_notebook": {"start_method": "fork"},
    "mgwfbp_topk": {"start_method": "popen", "compressor": "topk"},
    "mgwfbp_cross_iteration": {"start_method": "popen", "schedule": "cross_iteration"},
    "mgwfbp_horovod": {"start_method": "popen", "transport": "horovod"},
}
_FOR_FABRIC = (
    "With Fabric or a loop of your own, wrap the optimizer in lightning_mgwfbp.MergedOptimizer"
)


class MGWFBPStrategy(ExchangingStrategy):
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
        detect_divergence_every_n_steps: compare the bits of all weights over the ranks after every
            so many steps, and end in an error that names what differs. None: compare a twentieth of
            them every 50 steps, all within 1,000; last bits that differ are a warning then, more
            is an error. (With a `ddp_comm_hook`, None compares nothing.)
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
            beside which torch.distributed carries Lightning's own traffic, over gloo unless
            `process_group_backend` is another, and on CPUs what `schedule="cross_iteration"` sends.
        accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin,
            process_group_backend, timeout, start_method: as for DDPStrategy.
        ddp_arguments: every other argument of DDPStrategy and DistributedDataParallel; a Python
            ddp_comm_hook is run on the merge groups, the others are refused or warned about as
            `lightning_mgwfbp.ddp_arguments.TABLE` says.

    Raises:
        ValueError: an argument is out of range or cannot be honoured.
    """

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
        transport: Carrier = "auto",
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
        given = [b for b in (broadcast_buffers, forward_sync_buffers) if b is not None]
        join = JoinOptions(
            transport=transport,
            timeout=timeout,
            init_sync=init_sync,
            broadcast_buffers=all(given),
            uneven_inputs=uneven_inputs,
        )
        if transport == "horovod":
            load_horovod()  # or say now that it is missing
            if process_group_backend not in (None, "gloo"):
                rank_zero_warn(
                    f"`MGWFBPStrategy(process_group_backend={process_group_backend!r})` has no"
                    " effect on gradients under transport='horovod': it is for Lightning's own"
                    " traffic alone."
                )
            process_group_backend = process_group_backend or "gloo"
            if cluster_environment is None and HorovodEnvironment.detect():
                cluster_environment = HorovodEnvironment()
        options = Options(
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
        super().__init__(
            options,
            join,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            start_method=start_method,
        )

    def __repr__(self) -> str:
        # all that Fabric shows of an object which it refuses
        return f"<{type(self).__name__}, for Trainer. {_FOR_FABRIC}>"

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

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for name, arguments in _NAMES.items():
            what = f"Merged, planned gradient exchange with {arguments}"
            strategy_registry.register(name, cls, description=what, override=True, **arguments)


MGWFBPStrategy.register_strategies(StrategyRegistry)


def _refuse_fabric(given: str) -> NoReturn:
    raise ValueError(
        f"`Fabric(strategy={given!r})` cannot work: it is a strategy of Trainer. {_FOR_FABRIC}."
    )


for _name in _NAMES:
    FABRIC_REGISTRY.register(_name, _refuse_fabric, override=True, given=_name)
