"""Data parallelism for PyTorch: parameter groups, gradient reduction, sharded optimizer steps."""

from lamina.ddp.axes import (
    DataParallelAxes,
    check_dimensions,
    check_experts,
    data_parallel_axes,
)
from lamina.ddp.config import DistributedDataParallelConfig
from lamina.ddp.contract import DataParallel
from lamina.ddp.decoupled import show_decoupled
from lamina.ddp.ending import BackwardEnd
from lamina.ddp.finalize import FinalizesStep, finalize_grads
from lamina.ddp.flat_step import ELEMENTWISE, FlatStep
from lamina.ddp.grad_scaler import ShardedGradScaler
from lamina.ddp.gradients import GroupGradients
from lamina.ddp.group import (
    GroupSettings,
    ParameterGroup,
    WeightsFactory,
    plan_layout,
    whole_weights,
)
from lamina.ddp.grouping import GroupKey, ParameterRef, collect_parameters, group_parameters
from lamina.ddp.inspection import (
    HasGroups,
    InspectsItself,
    full_gradients,
    full_parameters,
    groups_of,
)
from lamina.ddp.memory import MemoryBudgets, MemoryPlan, memory_plan
from lamina.ddp.norms import clip_grad_norm
from lamina.ddp.plain_grads import finalize_plain_grads
from lamina.ddp.precision import GroupDtypes, resolve_dtypes
from lamina.ddp.rank_sums import GradientState, RankSum, Squares
from lamina.ddp.reducer import (
    GradientReducer,
    LargeGradientError,
    NonFiniteGradientError,
    Order,
)
from lamina.ddp.reduction import ORDERED, Reduction, resolve_reduction
from lamina.ddp.registered import registration_refusal
from lamina.ddp.repoint import point_optimizer_at, refuse_optimizer
from lamina.ddp.sharded_optimizer import ShardedOptimizer
from lamina.ddp.sinks import GradientSink, gradient_sink, has_gradient_sink, main_of
from lamina.ddp.strategy import Cadence, Strategy, resolve_strategy
from lamina.ddp.transient import TransientBuffers
from lamina.ddp.trees import tensors_in
from lamina.ddp.unfinished import warn_of_unfinished_steps
from lamina.ddp.weights import Weights, WeightsState, WholeWeights
from lamina.ddp.wrapper import DistributedDataParallel

__all__ = [
    "ELEMENTWISE",
    "ORDERED",
    "BackwardEnd",
    "Cadence",
    "DataParallel",
    "DataParallelAxes",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "FinalizesStep",
    "FlatStep",
    "GradientReducer",
    "GradientSink",
    "GradientState",
    "GroupDtypes",
    "GroupGradients",
    "GroupKey",
    "GroupSettings",
    "HasGroups",
    "InspectsItself",
    "LargeGradientError",
    "MemoryBudgets",
    "MemoryPlan",
    "NonFiniteGradientError",
    "Order",
    "ParameterGroup",
    "ParameterRef",
    "RankSum",
    "Reduction",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "Squares",
    "Strategy",
    "TransientBuffers",
    "Weights",
    "WeightsFactory",
    "WeightsState",
    "WholeWeights",
    "check_dimensions",
    "check_experts",
    "clip_grad_norm",
    "collect_parameters",
    "data_parallel_axes",
    "finalize_grads",
    "finalize_plain_grads",
    "full_gradients",
    "full_parameters",
    "gradient_sink",
    "group_parameters",
    "groups_of",
    "has_gradient_sink",
    "main_of",
    "memory_plan",
    "plan_layout",
    "point_optimizer_at",
    "refuse_optimizer",
    "registration_refusal",
    "resolve_dtypes",
    "resolve_reduction",
    "resolve_strategy",
    "show_decoupled",
    "tensors_in",
    "warn_of_unfinished_steps",
    "whole_weights",
]
