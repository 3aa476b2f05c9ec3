"""Gradient communication that is merged, overlapped and planned, for PyTorch Lightning.

import lightning_mgwfbp
Trainer(strategy="mgwfbp", devices=2)
"""

from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.broadcast import broadcast_optimizer_state, broadcast_parameters
from lightning_mgwfbp.exchange.comm_hook import DDPCommHook
from lightning_mgwfbp.exchange.compressors import Cast, Compressor, Quantize8, RandomK, TopK
from lightning_mgwfbp.exchange.horovod_transport import HorovodTransport
from lightning_mgwfbp.exchange.power_sgd import PowerSGD
from lightning_mgwfbp.plan import (
    MGWFBP,
    WFBP,
    AlphaBeta,
    MergePlan,
    ModelProfile,
    Optimal,
    Planner,
    Single,
    Threshold,
)
from lightning_mgwfbp.strategy import MGWFBPStrategy

__all__ = [
    "MGWFBP",
    "WFBP",
    "AlphaBeta",
    "Cast",
    "Compressor",
    "DDPCommHook",
    "HorovodTransport",
    "MGWFBPStrategy",
    "MergePlan",
    "MergedOptimizer",
    "ModelProfile",
    "Optimal",
    "Planner",
    "PowerSGD",
    "Quantize8",
    "RandomK",
    "Single",
    "Threshold",
    "TopK",
    "WarmupCallback",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
