"""Gradient communication that is merged, overlapped and planned, for PyTorch Lightning.

import lightning_mgwfbp
Trainer(strategy="mgwfbp", devices=2)
"""

from lightning_mgwfbp.callbacks import WarmupCallback
from lightning_mgwfbp.engine.merged_optimizer import MergedOptimizer
from lightning_mgwfbp.exchange.broadcast import broadcast_optimizer_state, broadcast_parameters
from lightning_mgwfbp.exchange.compressors import Cast, Compressor
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
    "MGWFBPStrategy",
    "MergePlan",
    "MergedOptimizer",
    "ModelProfile",
    "Optimal",
    "Planner",
    "Single",
    "Threshold",
    "WarmupCallback",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]
