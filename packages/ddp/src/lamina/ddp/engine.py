"""What wrappers build on: parameter groups, weights, gradients, the reducer and the flat step."""

from lamina.buffers.engine import ScratchBuffers
from lamina.ddp.backward.gradient_hooks import (
    gradient_sink,
    has_gradient_sink,
    main_of,
    refuse_wrapped,
)
from lamina.ddp.backward.reducer import BackwardEnd, GradientReducer, Order
from lamina.ddp.compat import local_of_state_call
from lamina.ddp.execution.engine import Engine, Guards, Prefetcher, RegistrationOrder
from lamina.ddp.execution.hooks import (
    Lent,
    ModuleWatch,
    UnitHooks,
    attach_hooks,
    bring_back,
    hooks_of,
    lend,
    register_forward_method,
    unit_of,
)
from lamina.ddp.execution.module_buffers import BufferPolicy, ModuleBuffers
from lamina.ddp.execution.unit import UnavailableError, Unit
from lamina.ddp.finalize.finalize import finalize_plain_gradients
from lamina.ddp.gradients.group_gradients import RankSum
from lamina.ddp.gradients.reduction import GradientReduction, resolve_reduction
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.group.group import GroupSettings, ParameterGroup, plan_layout
from lamina.ddp.group.weights import COMING, LIVE, Weights, WeightsState, WholeWeights
from lamina.ddp.inspect.inspection import HasGroups, groups_of
from lamina.ddp.inspect.memory import MemoryBudgets
from lamina.ddp.inspect.wire import WireBytes
from lamina.ddp.optimizer.adopt_parameters import (
    refuse_optimizer,
)
from lamina.ddp.optimizer.flat_step import COUNTERS
from lamina.ddp.optimizer.grad_scaler import answer_scalers
from lamina.ddp.optimizer.muon import ELEMENTWISE_STATE
from lamina.ddp.optimizer.whole_step import (
    adopt_optimizer,
    needs_whole_tensors,
    show_decoupled,
)
from lamina.ddp.parameters.axes import (
    DataParallelAxes,
    ModelAxes,
    check_dimensions,
    check_experts,
    data_parallel_axes,
    refuse_unplaced,
)
from lamina.ddp.parameters.dtypes import GroupDtypes, resolve_dtypes
from lamina.ddp.parameters.facts import require_same_model
from lamina.ddp.parameters.invariance import check_invariance, check_invariant_wire
from lamina.ddp.parameters.parameters import ParameterRef, collect_parameters, group_parameters
from lamina.ddp.parameters.strategy import resolve_strategy
from lamina.ddp.parameters.tensor_trees import Loan, map_tensors, tensors_in
from lamina.ddp.wrapper.buckets import registration_refusal

__all__ = [
    "COMING",
    "COUNTERS",
    "ELEMENTWISE_STATE",
    "LIVE",
    "BackwardEnd",
    "BufferPolicy",
    "DataParallelAxes",
    "Engine",
    "GradientReducer",
    "GradientReduction",
    "GradientState",
    "GroupDtypes",
    "GroupSettings",
    "Guards",
    "HasGroups",
    "Lent",
    "Loan",
    "MemoryBudgets",
    "ModelAxes",
    "ModuleBuffers",
    "ModuleWatch",
    "Order",
    "ParameterGroup",
    "ParameterRef",
    "Prefetcher",
    "RankSum",
    "RegistrationOrder",
    "ScratchBuffers",
    "UnavailableError",
    "Unit",
    "UnitHooks",
    "Weights",
    "WeightsState",
    "WholeWeights",
    "WireBytes",
    "adopt_optimizer",
    "answer_scalers",
    "attach_hooks",
    "bring_back",
    "check_dimensions",
    "check_experts",
    "check_invariance",
    "check_invariant_wire",
    "collect_parameters",
    "data_parallel_axes",
    "finalize_plain_gradients",
    "gradient_sink",
    "group_parameters",
    "groups_of",
    "has_gradient_sink",
    "hooks_of",
    "lend",
    "local_of_state_call",
    "main_of",
    "map_tensors",
    "needs_whole_tensors",
    "plan_layout",
    "refuse_optimizer",
    "refuse_unplaced",
    "refuse_wrapped",
    "register_forward_method",
    "registration_refusal",
    "require_same_model",
    "resolve_dtypes",
    "resolve_reduction",
    "resolve_strategy",
    "show_decoupled",
    "tensors_in",
    "unit_of",
]
