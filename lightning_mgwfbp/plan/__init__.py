"""Pure numerics: what was measured, what messages cost, and which gradients to merge. No torch."""

from lightning_mgwfbp.plan.costs import AlphaBeta, Cost, DenseCost, TableCost, wire_nbytes
from lightning_mgwfbp.plan.fit import LinkFit, fit_alpha_beta
from lightning_mgwfbp.plan.merge_plan import MergePlan
from lightning_mgwfbp.plan.planners import (
    MGWFBP,
    PLANNERS,
    WFBP,
    Optimal,
    Planner,
    Single,
    Threshold,
    resolve_planner,
)
from lightning_mgwfbp.plan.profile import FORMAT, LayerProfile, ModelProfile, Span
from lightning_mgwfbp.plan.timeline import Timeline, lower_bound_seconds, simulate

__all__ = [
    "FORMAT",
    "MGWFBP",
    "PLANNERS",
    "WFBP",
    "AlphaBeta",
    "Cost",
    "DenseCost",
    "LayerProfile",
    "LinkFit",
    "MergePlan",
    "ModelProfile",
    "Optimal",
    "Planner",
    "Single",
    "Span",
    "TableCost",
    "Threshold",
    "Timeline",
    "fit_alpha_beta",
    "lower_bound_seconds",
    "resolve_planner",
    "simulate",
    "wire_nbytes",
]
