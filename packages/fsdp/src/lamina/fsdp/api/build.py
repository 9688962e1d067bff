"""From a module and its sharding to units, and from units to an engine.

`fully_shard` takes both steps at once, for all units of a model. `shard_module` takes the first
one, for one unit, at each call, and the second one when the model is first used.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import nn

from lamina.buffers import BufferLayout, FlatBuffer, StoragePool
from lamina.ddp import Strategy
from lamina.ddp.engine import (
    DataParallelAxes,
    Engine,
    GradientReducer,
    GroupDtypes,
    GroupSettings,
    Guards,
    ModuleBuffers,
    ModuleWatch,
    Order,
    ParameterGroup,
    ParameterRef,
    Prefetcher,
    ScratchBuffers,
    Unit,
    UnitHooks,
    Weights,
    WholeWeights,
    check_experts,
    group_parameters,
    plan_layout,
)
from lamina.fsdp.api.resolve import Sharding
from lamina.fsdp.debugging.debug_order import OrderCheck
from lamina.fsdp.debugging.debug_storage import StorageCheck
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.units.casting import cast_buffers, keep_modules
from lamina.fsdp.units.dtensors import LocalisedParameters
from lamina.fsdp.units.materialise import materialise_unit, move_buffers
from lamina.fsdp.units.plan import UnitPlan
from lamina.fsdp.weights.offloaded import OffloadedWeights, offloaded
from lamina.fsdp.weights.sharded import EncodedWeights, ShardedWeights
from lamina.fsdp.weights.unit_slots import UnitSlots

__all__ = ["build_units", "start_engine", "storage_pool", "updated_apart", "without_values"]


@dataclass(frozen=True)
class _GroupPlan:
    """One group of a unit before it is made.

    `settings` are what the group has in common with others, `encoded` says whether its weights are
    gathered as codes, and `key` is its name in the pool.
    """

    refs: tuple[ParameterRef, ...]
    axes: DataParallelAxes
    dtypes: GroupDtypes
    settings: GroupSettings
    encoded: bool
    key: tuple[object, ...]

    @property
    def trained(self) -> bool:
        return self.refs[0].parameter.requires_grad

    def layout(self) -> BufferLayout:
        return plan_layout(self.refs, self.axes, self.settings)


def storage_pool(sharding: Sharding) -> StoragePool:
    """The memory that units are gathered into."""
    memory = sharding.slot_memory
    return StoragePool(
        sharding.device,
        mode="slots" if sharding.settings.fsdp_double_buffer else "resize",
        poison=sharding.settings.check_storage,
        slot_context=None if memory is None else memory.allocating,
    )


def build_units(
    root: nn.Module,
    plans: Sequence[UnitPlan],
    sharding: Sharding,
    scratch: ScratchBuffers,
    pool: StoragePool,
    *,
    buffers_later: bool = False,
) -> list[Unit]:
    """Give parameters of the module `root` values and buffers, unit by unit (collective).

    `pool` is the memory of whole weights, and `buffers_later` as of `materialise_unit`. ValueError
    says what cannot be sharded like this, before anything is changed.
    """
    settings, precision = sharding.settings, sharding.settings.precision
    groups = [tuple(_plan_groups(plan, sharding)) for plan in plans]
    for plan, planned in zip(plans, groups, strict=True):
        check_experts(plan.refs, sharding.dense, sharding.expert, sharding.model)
        for group in planned:
            _check_gradient_dtypes(group)
    _check_budgets(plans, groups, settings)
    own = {id(module): module for plan in plans for module in plan.own_modules()}
    keep_modules(own.values(), [ref for plan in plans for ref in plan.refs], precision)
    units = [
        _make_unit(plan, planned, sharding, scratch, pool, buffers_later)
        for plan, planned in zip(plans, groups, strict=True)
    ]
    cast_buffers(((n, m) for n, m in root.named_modules() if id(m) in own), precision)
    for unit in units:
        unit.reshard()
    return units


def start_engine(
    hooks: Sequence[UnitHooks],
    sharding: Sharding,
    scratch: ScratchBuffers,
    pool: StoragePool,
    *,
    wrapper: str = "fully_shard",
    left_alone: Collection[int] = (),
) -> Engine:
    """Put the units of one model to work.

    `hooks` are those of all modules that are units, or one together, the root's first, whose
    `sharding` counts. Slots of the pool alone are planned for all units together. `wrapper` is what
    the user has called, for messages, and `left_alone` are `id`s of parameters that were to be left
    out.
    """
    settings = sharding.settings
    units = list(dict.fromkeys(each.unit for each in hooks))
    trained = [group for unit in units for group in unit.groups if group.requires_grad]
    gathered = all(group.settings.strategy.gathers for group in trained)
    reducer = GradientReducer(
        trained[::-1],
        scratch,
        # Gathers already force one order of units on all ranks; without them, a fixed list does.
        order=Order.AS_CLOSED if gathered else Order.STATIC,
        overlap=settings.overlap_grad_reduce,
        max_bytes_in_flight=settings.reduce_budget,
        max_bytes_held=max(_of_two_units(units), settings.reduce_budget or 0),
        check_finite=settings.report_nan_in_param_grad,
    )
    check = OrderCheck(sharding.dense, units, sharding.device) if settings.check_order else None
    ahead = int(settings.overlap_param_gather)
    slots = UnitSlots(pool, fixed_addresses=settings.cuda_graph_mode, memory=sharding.slot_memory)
    buffers = _module_buffers(sharding)
    engine = Engine(
        units,
        reducer,
        Prefetcher(units, ahead=ahead, budget=settings.gather_budget),
        slots=slots if settings.fsdp_double_buffer else None,
        guards=Guards(
            watch=ModuleWatch(
                (group for unit in units for group in unit.groups),
                wrapper,
                "Give it to fully_shard(model, optimizer) or fully_shard_optimizer(optimizer, "
                "model), or make it over model.parameters() before the first forward",
                left_alone,
            ),
            module_buffers=buffers if buffers.per_forward else None,
            order=check,
            reads=StorageCheck(pool).watching if settings.check_storage else nullcontext,
        ),
    )
    for each in hooks:
        each.start(engine)
    return engine


def _of_two_units(units: Sequence[Unit]) -> int:
    """Bytes of gradients of two units of the kind that a backward mostly consists of.

    These are the largest of a class that several units have. An embedding or a head may be larger
    than all of them, and its reduction then ends before the next unit's gradients are kept.
    """
    classes = Counter(unit.module_class for unit in units)
    sizes = [
        (
            classes[unit.module_class] > 1,
            sum(group.trained.wire_bytes for group in unit.groups if group.requires_grad),
        )
        for unit in units
    ]
    return 2 * max(sizes)[1]


def updated_apart(refs: Iterable[ParameterRef], sharding: Sharding) -> dict[int, str]:
    """Names, by `id`, of the parameters that will get a main parameter beside them."""
    precision = sharding.settings.precision
    found: dict[int, str] = {}
    for ref in refs:
        placements = sharding.settings.strategy_of(ref.name).placements
        dtypes = precision.dtypes(ref.parameter.dtype, keep=precision.keeps(ref.name))
        trained = ref.parameter.requires_grad  # frozen ones have no other main weights
        updated = placements.optimizer_state if trained else placements.model_weights
        axes = _axes_of(ref, sharding)
        cut = any(one.cuts for one in axes.effective(updated))
        elsewhere = _encoded(ref, sharding) or sharding.offload is not None
        if cut or elsewhere or (trained and dtypes.main != dtypes.weights):
            found[id(ref.parameter)] = ref.name
    return found


def without_values(settings: ShardingSettings) -> ShardingSettings:
    """Settings with which meta parameters get memory, and values that do not matter."""

    def fill(module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                parameter.zero_()

    return replace(settings, init_module=fill, sync_module_states=False)


# -- groups ---------------------------------------------------------------------------------------


def _plan_groups(plan: UnitPlan, sharding: Sharding) -> Iterator[_GroupPlan]:
    precision = sharding.settings.precision
    kinds: dict[tuple[bool, bool, Strategy], list[ParameterRef]] = {}
    for ref in plan.refs:
        strategy = sharding.settings.strategy_of(ref.name)
        kind = (precision.keeps(ref.name), _encoded(ref, sharding), strategy)
        uncut = id(ref.parameter) in sharding.whole
        kinds.setdefault(kind, []).append(_uncut(ref) if uncut else ref)
    for (keep, encoded, strategy), chosen in kinds.items():
        settings = _group_settings(strategy, sharding)
        for key, refs in group_parameters(chosen):
            dtypes = precision.dtypes(key.dtype, keep=keep)
            single = sharding.settings.disable_bucketing
            for members in [[ref] for ref in refs] if single else [refs]:
                name = (plan.name, keep, encoded, members[0].name, *key.__dict__.values())
                axes = _axes_of(members[0], sharding)
                yield _GroupPlan(tuple(members), axes, dtypes, settings, encoded, name)


def _group_settings(strategy: Strategy, sharding: Sharding) -> GroupSettings:
    settings, offload = sharding.settings, sharding.offload
    common = GroupSettings(
        strategy,
        scale=None if settings.calculate_per_token_loss else 1.0 / sharding.dense.divisor,
        broadcast=settings.sync_module_states,
        reduction=settings.rank_sum,
        casts_in_gathers=offload is None,  # page-locked memory is copied as it is
        release_gradients=offload is None,  # and kept
        device=sharding.device,
    )
    if offload is None:
        return common
    return replace(
        common,
        reduction=offloaded(settings.rank_sum, sharding.device),
        kept_on=torch.device("cpu"),
        pinned=offload.pinned,
    )


def _axes_of(ref: ParameterRef, sharding: Sharding) -> DataParallelAxes:
    return sharding.expert if ref.role.expert and sharding.expert else sharding.dense


def _uncut(ref: ParameterRef) -> ParameterRef:
    """The same parameter as one block of rows (a row is a run of the last dimension)."""
    shape = ref.parameter.shape
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    return replace(ref, role=replace(ref.role, block_rows=max(rows, 1)))


def _encoded(ref: ParameterRef, sharding: Sharding) -> bool:
    settings, precision = sharding.settings, sharding.settings.precision
    if precision.weight_codec is None or not settings.strategy_of(ref.name).gathers:
        return False
    return any(fnmatch.fnmatch(ref.name, pattern) for pattern in precision.encoded)


def _check_gradient_dtypes(group: _GroupPlan) -> None:
    """Raise ValueError for main grads of a dtype that no reduction of a group writes.

    A reduction stores what it sends, or the fp32 sum of it; what replicas add up is fp32 already.
    The reproducible one keeps its sums apart, and rounds them to any dtype at the end.
    """
    if not group.trained or group.settings.reduction.cadence is not None:
        return
    axes, dtypes = group.axes, group.dtypes
    sent = dtypes.wire
    if axes.ranks_inside().outer.size > 1:
        sent = torch.promote_types(sent, torch.float32)
    if dtypes.grads in (torch.float32, sent):
        return
    over = f" ({sent} over the {axes.outer.size} replicas)" if sent != dtypes.wire else ""
    kept = " or ".join(dict.fromkeys([str(torch.float32), str(sent)]))
    other = "" if over else f" or grad_comm_dtype={dtypes.grads}"
    raise ValueError(
        f"main_grads_dtype={dtypes.grads}: gradients of {group.refs[0].name} travel in "
        f"{dtypes.wire}{over}, and their sum is kept in {kept}: use that{other}, or "
        "reproducible=True"
    )


def _check_budgets(
    plans: Sequence[UnitPlan], groups: Sequence[Sequence[_GroupPlan]], settings: ShardingSettings
) -> None:
    """Raise ValueError for limits under which a step could not be made."""
    gathers, reductions = settings.gather_budget, settings.reduce_budget
    gathered: dict[str, int] = {}
    for plan, planned in zip(plans, groups, strict=True):
        sizes = [(group, group.layout().size) for group in planned]
        gathered[plan.name] = sum(size * group.dtypes.weights.itemsize for group, size in sizes)
        for group, size in sizes:
            sent = size * group.dtypes.wire.itemsize
            if reductions is not None and group.trained and sent > reductions:
                raise ValueError(
                    f"reduce_budget={reductions} bytes, and gradients of {plan.name or 'the root'} "
                    f"are {sent} bytes on the wire: raise it, or choose smaller fsdp_unit_modules"
                )
    within = {plan.name: set(map(id, plan.module.modules())) for plan in plans}
    for plan in plans:
        around = [name for name, inside in within.items() if id(plan.module) in inside]
        needed = sum(gathered[name] for name in around)
        if gathers is not None and needed > gathers:
            names = " and ".join(name or "the root" for name in around)
            raise ValueError(
                f"gather_budget={gathers} bytes, and the whole weights of {names}, which compute "
                f"together, are {needed} bytes: raise it, or choose smaller fsdp_unit_modules"
            )


# -- units ----------------------------------------------------------------------------------------


def _make_unit(
    plan: UnitPlan,
    groups: Sequence[_GroupPlan],
    sharding: Sharding,
    scratch: ScratchBuffers,
    pool: StoragePool,
    buffers_later: bool,
) -> Unit:
    """Values for a unit's meta parameters, and buffers for all (collective)."""
    settings, device = sharding.settings, sharding.device
    layouts = [(group.refs, group.layout()) for group in groups]
    materialise_unit(plan, device, settings.init_module, layouts, buffers_later)
    move_buffers(plan.own_modules(), device)
    if settings.sync_module_states:
        _module_buffers(sharding).start(plan.module, plan.own_modules())
    made = [
        ParameterGroup(
            group.refs,
            group.axes,
            group.dtypes,
            group.settings,
            scratch,
            _weights_factory(pool, group, sharding),
        )
        for group in groups
    ]
    return Unit(
        plan.name,
        type(plan.module).__name__,
        made,
        members=plan.members,
        dress=LocalisedParameters.among(plan.refs),
    )


def _module_buffers(sharding: Sharding) -> ModuleBuffers:
    return ModuleBuffers(sharding.settings.broadcast_buffers, sharding.dense, sharding.expert)


def _weights_factory(
    pool: StoragePool, group: _GroupPlan, sharding: Sharding
) -> Callable[[FlatBuffer, DataParallelAxes], Weights]:
    codec = sharding.settings.precision.weight_codec if group.encoded else None

    def make(local: FlatBuffer, axes: DataParallelAxes) -> Weights:
        if sharding.offload is not None:
            return OffloadedWeights(local, axes, pool, group.key)
        if codec is not None:
            return EncodedWeights(local, axes, pool, group.key, group.dtypes.weights, codec)
        if any(local.cuts):
            return ShardedWeights(local, axes, pool, group.key, group.dtypes.weights)
        return WholeWeights(local, axes)

    return make
