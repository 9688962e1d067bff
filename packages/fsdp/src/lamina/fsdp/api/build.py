"""From a module and settings to an engine: axes, units, groups, hooks."""

from __future__ import annotations

import fnmatch
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from lamina.buffers import BufferLayout, FlatBuffer, StoragePool
from lamina.ddp import Strategy
from lamina.ddp.engine import (
    ORDERED,
    DataParallelAxes,
    GradientReducer,
    GroupDtypes,
    GroupSettings,
    Order,
    ParameterGroup,
    ParameterRef,
    Reduction,
    TransientBuffers,
    Weights,
    WholeWeights,
    check_experts,
    group_parameters,
    plan_layout,
)
from lamina.fsdp.execution.budgets import check_budgets
from lamina.fsdp.execution.debug_order import OrderCheck
from lamina.fsdp.execution.engine import ShardingEngine
from lamina.fsdp.execution.hooks import attach_hooks, rest_for_state_dicts
from lamina.fsdp.execution.unit import Unit
from lamina.fsdp.module.sharded_module import ShardedModule, adopt
from lamina.fsdp.settings.hardware_limits import SlotMemory
from lamina.fsdp.settings.meshes import ModelAxes
from lamina.fsdp.settings.precision import MixedPrecisionPolicy
from lamina.fsdp.units.casting import cast_buffers, keep_modules
from lamina.fsdp.units.dtensors import localise_dtensors
from lamina.fsdp.units.materialise import (
    broadcast_buffers,
    materialise_unit,
    move_buffers,
    refuse_uninitialised,
)
from lamina.fsdp.units.plan import UnitPlan, plan_units, refine
from lamina.fsdp.weights.encoded import EncodedWeights
from lamina.fsdp.weights.offloaded import Offload, OffloadedWeights, offloaded
from lamina.fsdp.weights.sharded import ShardedWeights

__all__ = [
    "ShardingSettings",
    "check_copies",
    "check_gradient_dtypes",
    "make_unit",
    "shard_model",
]


@dataclass(frozen=True)
class ShardingSettings:
    """Everything `shard_model` needs to know besides the module.

    Attributes:
        strategy: placements and cadence.
        dense: data-parallel axes of ordinary parameters.
        expert: those of expert parameters; None where the mesh has none.
        model: the axes along which ranks hold different parts of the model.
        precision: dtypes.
        unit_classes: which modules are units; None finds them.
        overlap_reduce: reduce gradients while backward goes on.
        overlap_gather: gather the next unit while one computes.
        average: scale gradients by 1/D; otherwise leave sums (per-token loss).
        check_finite: look for NaN and infinity before gradients are sent.
        broadcast: start from the first data-parallel rank's values.
        slots: gather into fixed memory shared by units that never live together (planned after
            the first step) instead of storage that is released and regrown.
        slot_memory: where slots are allocated; None is as any tensor.
        fixed_addresses: once slots are planned, no unit takes another place (CUDA graphs).
        gather_budget: bytes of whole weights that may be live; None gathers one unit ahead.
        reduce_budget: bytes of gradients that may be on the wire; None is two reductions.
        poison: fill released weights with NaN, to find whoever reads them.
        fine_grained: make every module that holds parameters a unit.
        bucket_per_parameter: a buffer for each parameter instead of one per kind and unit.
        whole: `id`s of parameters that no shard boundary may cut.
        reduction: how gradients are summed over ranks.
        offload: keep shards in host memory; None keeps them on the device.
        device: where the model computes: its parameters and buffers are moved there.
        init_module: initialises a meta module's own tensors; None calls `reset_parameters`.
        check_order: compare over ranks which units run (see `OrderCheck`).
    """

    strategy: Strategy
    dense: DataParallelAxes
    expert: DataParallelAxes | None = None
    model: ModelAxes = field(default_factory=ModelAxes)
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    unit_classes: Sequence[type[nn.Module] | str] | None = None
    overlap_reduce: bool = True
    overlap_gather: bool = True
    average: bool = True
    check_finite: bool = False
    broadcast: bool = True
    slots: bool = False
    slot_memory: SlotMemory | None = None
    fixed_addresses: bool = False
    gather_budget: int | None = None
    reduce_budget: int | None = None
    poison: bool = False
    fine_grained: bool = False
    bucket_per_parameter: bool = False
    whole: frozenset[int] = frozenset()
    reduction: Reduction = ORDERED
    offload: Offload | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    init_module: Callable[[nn.Module], None] | None = None
    check_order: bool = False


def shard_model(module: nn.Module, settings: ShardingSettings) -> ShardedModule:
    """Cut a module's parameters into groups by units and put an engine on its hooks."""
    localise_dtensors(module)
    plans = plan_units(module, settings.unit_classes)
    refuse_uninitialised(module, settings.init_module)
    if settings.fine_grained:
        plans = refine(module, plans)
    _check_budgets(plans, settings)
    for plan in plans:
        check_copies(plan, settings)
        check_gradient_dtypes(plan, settings)
    transient = TransientBuffers()
    memory = settings.slot_memory
    pool = StoragePool(
        settings.device,
        mode="slots" if settings.slots else "resize",
        poison=settings.poison,
        slot_context=None if memory is None else memory.allocating,
    )
    refs = [ref for plan in plans for ref in plan.refs]
    keep_modules(module.modules(), refs, settings.precision)
    units = [make_unit(plan, settings, transient, pool) for plan in plans]
    cast_buffers(module.named_modules(), settings.precision)
    trained = [group for unit in units for group in unit.groups if group.requires_grad]
    gathers = settings.strategy.gathers
    reducer = GradientReducer(
        trained[::-1],
        settings.reduction.cadence or settings.strategy.cadence,
        transient,
        # Gathers already force one order of units on all ranks; without them, a fixed list does.
        order=Order.AS_CLOSED if gathers else Order.STATIC,
        overlap=settings.overlap_reduce,
        max_bytes_in_flight=settings.reduce_budget,
        check_finite=settings.check_finite,
    )
    engine = ShardingEngine(
        units,
        reducer,
        pool=pool if settings.slots else None,
        overlap_gather=settings.overlap_gather,
        fixed_addresses=settings.fixed_addresses,
        gather_budget=settings.gather_budget,
        order_check=OrderCheck(settings.dense, units, settings.device)
        if settings.check_order and gathers
        else None,
    )
    engine.slot_memory = memory
    for plan, unit in zip(plans, units, strict=True):
        _attach(plan, unit, engine, settings.precision)
    return adopt(module, engine)


def _attach(
    plan: UnitPlan, unit: Unit, engine: ShardingEngine, policy: MixedPrecisionPolicy
) -> None:
    root = not plan.name
    attach_hooks(
        plan.module,
        engine,
        unit,
        input_dtype=policy.param_dtype if root and policy.cast_forward_inputs else None,
        output_dtype=policy.output_dtype if root else None,
    )
    rest_for_state_dicts([plan.module], unit, lambda: engine)
    unit.reshard()


def make_unit(
    plan: UnitPlan, settings: ShardingSettings, transient: TransientBuffers, pool: StoragePool
) -> Unit:
    """Values for a unit's meta parameters, and buffers for all (collective)."""
    group_settings = _group_settings(settings)
    layouts = [
        (members, plan_layout(members, axes, group_settings))
        for members, axes, *_ in _groups_of(plan, settings)
    ]
    materialise_unit(plan, settings.device, settings.init_module, layouts)
    move_buffers(plan.own_modules(), settings.device)
    if settings.broadcast:
        broadcast_buffers(plan, settings.dense, settings.expert)
    groups = [
        ParameterGroup(
            members,
            axes,
            dtypes,
            group_settings,
            transient,
            _weights_factory(pool, name, settings, encode=_encoded(members[0], settings.precision)),
        )
        for members, axes, dtypes, name in _groups_of(plan, settings)
    ]
    return Unit(plan.name, plan.module, groups)


def check_copies(plan: UnitPlan, settings: ShardingSettings) -> None:
    """Raise ValueError for experts that ranks hold different parts of and would take for copies."""
    axes = settings.model
    check_experts(
        plan.refs,
        settings.dense,
        settings.expert,
        tp=axes.tp,
        expert_tp=axes.expert_tp,
        ep=axes.ep,
    )


def check_gradient_dtypes(plan: UnitPlan, settings: ShardingSettings) -> None:
    """Raise ValueError for main grads of a dtype that no reduction of a unit's groups writes.

    A reduction stores what it sends, or the fp32 sum of it; what replicas add up is fp32 already.
    The reproducible one keeps its sums apart, and rounds them to any dtype at the end.
    """
    for members, axes, dtypes, _ in _groups_of(plan, settings):
        if not members[0].parameter.requires_grad or settings.reduction.cadence is not None:
            continue
        sent = dtypes.wire
        if axes.ranks_inside().outer.size > 1:
            sent = torch.promote_types(sent, torch.float32)
        if dtypes.grads in (torch.float32, sent):
            continue
        over = f" ({sent} over the {axes.outer.size} replicas)" if sent != dtypes.wire else ""
        kept = " or ".join(dict.fromkeys([str(torch.float32), str(sent)]))
        other = "" if over else f" or grad_comm_dtype={dtypes.grads}"
        raise ValueError(
            f"main_grads_dtype={dtypes.grads}: gradients of {members[0].name} travel in "
            f"{dtypes.wire}{over}, and their sum is kept in {kept}: use that{other}, or "
            "reproducible=True"
        )


def updated_apart(refs: Iterable[ParameterRef], settings: ShardingSettings) -> dict[int, str]:
    """Names, by `id`, of the parameters that will get a main parameter beside them."""
    placements = settings.strategy.placements
    found: dict[int, str] = {}
    for ref in refs:
        axes = settings.expert if ref.role.expert and settings.expert else settings.dense
        dtypes = settings.precision.dtypes(ref.parameter.dtype, keep=_kept(ref, settings.precision))
        trained = ref.parameter.requires_grad  # frozen ones have no other main weights
        updated = placements.optimizer_state if trained else placements.model_weights
        cut = any(one.cuts for one in axes.effective(updated))
        encoded = _encoded(ref, settings.precision) or settings.offload is not None
        if cut or encoded or (trained and dtypes.main != dtypes.weights):
            found[id(ref.parameter)] = ref.name
    return found


def _check_budgets(plans: Sequence[UnitPlan], settings: ShardingSettings) -> None:
    if settings.gather_budget is None and settings.reduce_budget is None:
        return
    gathered, on_wire = ({plan.name: 0 for plan in plans} for _ in range(2))
    common = _group_settings(settings)
    for plan in plans:
        for members, axes, dtypes, _ in _groups_of(plan, settings):
            size = plan_layout(members, axes, common).size
            gathered[plan.name] += size * dtypes.weights.itemsize
            if members[0].parameter.requires_grad:
                wire = size * dtypes.wire.itemsize
                on_wire[plan.name] = max(on_wire[plan.name], wire)
    check_budgets(plans, gathered, on_wire, settings.gather_budget, settings.reduce_budget)


def _group_settings(settings: ShardingSettings) -> GroupSettings:
    common = GroupSettings(
        settings.strategy,
        scale=1.0 / settings.dense.divisor if settings.average else None,
        broadcast=settings.broadcast,
        reduction=settings.reduction,
        release_gradients=settings.offload is None,  # page-locked memory is kept
        device=settings.device,
    )
    if settings.offload is None:
        return common
    return replace(
        common,
        reduction=offloaded(settings.reduction, settings.device),
        kept_on=torch.device("cpu"),
        pinned=settings.offload.pinned,
    )


def _groups_of(
    plan: UnitPlan, settings: ShardingSettings
) -> Iterator[tuple[list[ParameterRef], DataParallelAxes, GroupDtypes, tuple[object, ...]]]:
    """Members, axes, dtypes and the name in the pool of each of a unit's groups."""
    for keep, encode in itertools.product((False, True), repeat=2):
        chosen = [
            _uncut(ref) if id(ref.parameter) in settings.whole else ref
            for ref in plan.refs
            if _kept(ref, settings.precision) is keep
            and _encoded(ref, settings.precision) is encode
        ]
        for key, refs in group_parameters(chosen):
            dtypes = settings.precision.dtypes(key.dtype, keep=keep)
            axes = settings.expert if key.expert and settings.expert else settings.dense
            for members in [[ref] for ref in refs] if settings.bucket_per_parameter else [refs]:
                name = (plan.name, keep, encode, members[0].name, *key.__dict__.values())
                yield members, axes, dtypes, name


def _uncut(ref: ParameterRef) -> ParameterRef:
    """The same parameter as one block of rows (a row is a run of the last dimension)."""
    shape = ref.parameter.shape
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    return replace(ref, role=replace(ref.role, block_rows=max(rows, 1)))


def _kept(ref: ParameterRef, precision: MixedPrecisionPolicy) -> bool:
    return any(fnmatch.fnmatch(ref.name, pattern) for pattern in precision.keep_full_precision)


def _encoded(ref: ParameterRef, precision: MixedPrecisionPolicy) -> bool:
    if precision.weight_codec is None:
        return False
    return any(fnmatch.fnmatch(ref.name, pattern) for pattern in precision.encoded)


def _weights_factory(
    pool: StoragePool, name: tuple[object, ...], settings: ShardingSettings, *, encode: bool
) -> Callable[[BufferLayout, FlatBuffer, DataParallelAxes], Weights]:
    codec = settings.precision.weight_codec if encode else None

    def make(_: BufferLayout, local: FlatBuffer, axes: DataParallelAxes) -> Weights:
        if settings.offload is not None:
            return OffloadedWeights(local, axes, pool, name)
        if codec is not None:
            return EncodedWeights(local, axes, pool, name, codec)
        if any(local.cuts):
            return ShardedWeights(local, axes, pool, name)
        return WholeWeights(local, axes)

    return make
