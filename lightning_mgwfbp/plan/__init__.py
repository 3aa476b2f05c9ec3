"""Pure numerics: what was measured, what messages cost, and which gradients to merge. No torch."""

from lightning_mgwfbp.plan.costs import AlphaBeta, Cost, DenseCost, TableCost, wire_nbytes
from lightning_mgwfbp.plan.cross_iteration import plan_cross_iteration
from lightning_mgwfbp.plan.cross_timeline import CrossTimeline, simulate_cross_iteration
from lightning_mgwfbp.plan.densities import (
    choose_densities,
    largest_hidden_densities,
    nbytes_at_densities,
)
from lightning_mgwfbp.plan.fit import LinkFit, fit_alpha_beta
from lightning_mgwfbp.plan.forward import forward_split, forward_tails, with_forward_times
from lightning_mgwfbp.plan.halves import Half, HalvesCost
from lightning_mgwfbp.plan.low_rank import LowRankCost
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
from lightning_mgwfbp.plan.sparse_costs import (
    CheaperCost,
    SortSelection,
    SparseCost,
    TopKPairs,
    all_gather_like,
    all_gather_link,
    selected,
)
from lightning_mgwfbp.plan.table import Table
from lightning_mgwfbp.plan.timeline import Timeline, lower_bound_seconds, simulate

__all__ = [
    "FORMAT",
    "MGWFBP",
    "PLANNERS",
    "WFBP",
    "AlphaBeta",
    "CheaperCost",
    "Cost",
    "CrossTimeline",
    "DenseCost",
    "Half",
    "HalvesCost",
    "LayerProfile",
    "LinkFit",
    "LowRankCost",
    "MergePlan",
    "ModelProfile",
    "Optimal",
    "Planner",
    "Single",
    "SortSelection",
    "Span",
    "SparseCost",
    "Table",
    "TableCost",
    "Threshold",
    "Timeline",
    "TopKPairs",
    "all_gather_like",
    "all_gather_link",
    "choose_densities",
    "fit_alpha_beta",
    "forward_split",
    "forward_tails",
    "largest_hidden_densities",
    "lower_bound_seconds",
    "nbytes_at_densities",
    "plan_cross_iteration",
    "resolve_planner",
    "selected",
    "simulate",
    "simulate_cross_iteration",
    "wire_nbytes",
    "with_forward_times",
]
