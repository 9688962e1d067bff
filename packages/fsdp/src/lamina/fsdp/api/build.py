"""From settings and a module to units, and from units to an engine.

`fully_shard` takes all three steps at once, for all units of a model. `shard_module` takes the
first two (`resolve`, `build_units`), for one unit, at each call, and the third one (`start_engine`)
when the model is first used: only then is it known which module is the outermost one.
"""

import fnmatch
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.optim import Optimizer

from lamina.buffers import BufferLayout, FlatBuffer, Granularity, StoragePool
from lamina.collectives.engine import cuts_as_gloo
from lamina.ddp import Strategy
from lamina.ddp.engine import (
    DataParallelAxes,
    Engine,
    GradientReducer,
    GroupDtypes,
    GroupSettings,
    Guards,
    ModelAxes,
    ModuleBuffers,
    ModuleWatch,
    Order,
    ParameterGroup,
    ParameterRef,
    Prefetcher,
    RegistrationOrder,
    ScratchBuffers,
    Unit,
    UnitHooks,
    Weights,
    WholeWeights,
    attach_hooks,
    check_experts,
    check_invariant_wire,
    collect_parameters,
    group_parameters,
    needs_whole_tensors,
    plan_layout,
    refuse_unplaced,
)
from lamina.fsdp.debugging.debug_modes import OrderCheck, StorageCheck
from lamina.fsdp.settings.meshes import Mesh, computing_device, model_axes, resolve_meshes
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.state.cut_regions import beside_parts
from lamina.fsdp.units.casting import cast_buffers, keep_modules
from lamina.fsdp.units.dtensors import LocalisedParameters
from lamina.fsdp.units.materialise import materialise_unit, move_buffers
from lamina.fsdp.units.plan import UnitPlan
from lamina.fsdp.weights.offloaded import (
    OffloadedWeights,
    SideStream,
    check_offload,
    offloaded,
    two_streams,
)
from lamina.fsdp.weights.sharded import EncodedWeights, ShardedWeights
from lamina.fsdp.weights.unit_slots import UnitSlots, refuse_unavailable
from lamina.mesh import ParallelLayout
from lamina.mesh.engine import named_mesh


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Settings, and what they come to for one model: its mesh, its machine, its memory.

    `dense` and `expert` are the data-parallel axes of parameters (`expert` is None where the mesh
    has none), and along `model` ranks hold different parts of the model. The model computes on
    `device`, with shards on the host if it is `offloaded`, where reductions take turns on the
    streams `sides`. `whole` are `id`s of parameters that no shard boundary may cut, and
    `left_alone` of those that are not sharded at all. Units are gathered into `pool`, by a plan of
    `slots` if there are some, and reduced from `scratch`.
    """

    settings: ShardingSettings
    mesh: Mesh
    dense: DataParallelAxes
    expert: DataParallelAxes | None
    model: ModelAxes
    device: torch.device
    offloaded: bool
    sides: list[SideStream]
    whole: Collection[int]
    left_alone: Collection[int]
    scratch: ScratchBuffers
    pool: StoragePool
    slots: UnitSlots | None

    def axes_of(self, ref: ParameterRef) -> DataParallelAxes:
        """The data-parallel axes of a parameter."""
        return self.expert if ref.role.expert and self.expert else self.dense

    def encodes(self, ref: ParameterRef) -> bool:
        """Whether a parameter is gathered as codes."""
        precision = self.settings.precision
        if precision.weight_codec is None or not self.settings.strategy_of(ref.name).gathers:
            return False
        return any(fnmatch.fnmatch(ref.name, pattern) for pattern in precision.encoded)

    @property
    def reduces_on_gpu(self) -> bool:
        """Whether sums run beside a GPU's work. Meta tensors plan them so, but over gloo alone."""
        if self.device.type == "meta":
            return not cuts_as_gloo(self.dense.inner.sibling("reduce"), self.device)
        return self.device.type == "cuda"

    def module_buffers(self) -> ModuleBuffers:
        """What brings the buffers of modules together."""
        return ModuleBuffers(self.settings.broadcast_buffers, self.dense, self.expert)


def resolve(
    module: nn.Module,
    settings: ShardingSettings,
    optimizer: Optimizer | None = None,
    left_alone: Collection[int] = (),
) -> Sharding:
    """What settings come to for a module that is not sharded yet; `optimizer` will update it.

    ValueError names unknown mesh dimensions, and settings that this model or mesh excludes;
    UnavailableError what this machine lacks.
    """
    mesh = named_mesh(settings.device_mesh)
    if mesh is None:
        mesh = ParallelLayout().build()
    dense, expert = resolve_meshes(mesh, settings)
    # Which axes cut the model: a norm, a checkpoint and an optimizer have to know.
    refs, model = collect_parameters(module), model_axes(mesh, settings)
    on_meta = not refs or any(ref.parameter.is_meta for ref in refs)
    if settings.init_model_with_meta_device and not on_meta:
        raise ValueError(
            f"init_model_with_meta_device=True, and none of the {len(refs)} parameters of "
            f"{type(module).__name__} is on the meta device: build it under "
            'torch.device("meta"), or leave the argument out'
        )
    # A mesh that the user has made, and that names tp, says how many ranks it has: one, perhaps.
    if settings.device_mesh is None or model.tp is None:
        refuse_unplaced(refs, dense, model.tp)
    dense = replace(beside_parts(dense, refs, model), pieces=model.tp)
    if expert is not None:
        expert = replace(beside_parts(expert, refs, model), pieces=model.expert_tp)
    # A model that has to be offloaded may not fit on the device: its parameters may be on the
    # host, and then say nothing about where it computes.
    is_offloaded = isinstance(settings.offload_policy, CPUOffloadPolicy)
    device = computing_device(nn.Module() if is_offloaded else module, mesh, settings.device)
    if is_offloaded:
        check_offload(settings, device, dense)
    # Slots lie in memory that is registered with the groups that gather into it.
    gathering = [axes.inner.sibling("gather") for axes in (dense, expert) if axes is not None]
    refuse_unavailable(settings, gathering, device)
    slots = UnitSlots(settings, gathering, device) if settings.fsdp_double_buffer else None
    return Sharding(
        settings=settings,
        mesh=mesh,
        dense=dense,
        expert=expert,
        model=model,
        device=device,
        offloaded=is_offloaded,
        sides=two_streams(device),
        whole=needs_whole_tensors(optimizer),
        left_alone=left_alone,
        scratch=ScratchBuffers(),
        pool=StoragePool(device, poison=settings.check_storage) if slots is None else slots.pool,
        slots=slots,
    )


def build_units(
    root: nn.Module,
    plans: Sequence[UnitPlan],
    sharding: Sharding,
    *,
    buffers_later: bool = False,
) -> list[UnitHooks]:
    """Give parameters of the module `root` values and buffers, unit by unit (collective).

    The hooks of all modules that are units come back, the first plan's first: it is the one around
    the others. `buffers_later` is as of `materialise_unit`. ValueError says what cannot be sharded
    like this, before anything is changed.
    """
    precision = sharding.settings.precision
    _take_workspaces(sharding.device)
    # Groups are planned for all units first: what is refused of the last one is refused in time.
    groups = [tuple(_plan_groups(plan, sharding)) for plan in plans]
    for plan, planned in zip(plans, groups, strict=True):
        check_experts(plan.refs, sharding.dense, sharding.expert, sharding.model)
        for group in planned:
            _check_gradient_dtypes(group)
            if sharding.settings.invariant:
                remedy = "grad_comm_dtype of MixedPrecisionPolicy"
                check_invariant_wire("fully_shard", remedy, group.refs[0].name, group.dtypes)
    _check_budgets(plans, groups, sharding.settings)
    # Nothing has been changed so far, and nothing is refused from here on but missing values.
    own = {id(module): module for plan in plans for module in plan.own_modules()}
    keep_modules(own.values(), [ref for plan in plans for ref in plan.refs], precision)
    units = [
        _make_unit(plan, planned, sharding, buffers_later)
        for plan, planned in zip(plans, groups, strict=True)
    ]
    # After all of them, as a buffer may be that of modules of several units.
    cast_buffers(((n, m) for n, m in root.named_modules() if id(m) in own), precision)
    hooks = []
    for plan, unit in zip(plans, units, strict=True):
        unit.reshard()  # modules hold main parameters from now on, and optimizers are made of them
        inner = plan is not plans[0]
        hooks += attach_hooks(
            plan.called,
            unit,
            input_dtype=precision.param_dtype if precision.cast_forward_inputs else None,
            output_dtype=None if inner else precision.output_dtype,
            inner=inner,
        )
    return hooks


def _take_workspaces(device: torch.device) -> None:
    """Have matrix products take the memory that they keep, on this thread and on autograd's.

    Note [Workspaces come first]
        On a GPU the first product of a thread takes 32 MiB for good. Autograd's thread makes its
        first one in the first backward, when the largest free block is that of the logits. The
        allocator would cut the workspace out of it, and the next step would find no room for its
        logits there: at 1B that is 4 GiB.
    """
    if device.type == "cuda":
        with torch.inference_mode(False), torch.enable_grad():
            factor = torch.ones(1, 1, device=device, requires_grad=True)
            torch.autograd.backward(torch.mm(factor, factor).sum())


def start_engine(
    hooks: Sequence[UnitHooks],
    sharding: Sharding,
    wrapper: str,
    left_alone: Collection[int] = (),
) -> Engine:
    """Put the units of one model to work.

    `hooks` are those of all modules that are units, or one together, the root's first, whose
    `sharding` counts. `wrapper` is what the user has called, for messages, and `left_alone` are
    `id`s of parameters that were to be left out.
    """
    settings = sharding.settings
    # Several modules may be one unit. What is trained is reduced in the order of a backward, which
    # comes to the last registered first.
    units = list(dict.fromkeys(each.unit for each in hooks))
    trained = [group for unit in units for group in unit.groups if group.requires_grad]
    gathered = all(group.settings.strategy.gathers for group in trained)
    reducer = GradientReducer(
        trained[::-1],
        sharding.scratch,
        # Gathers already force one order of units on all ranks; without them, a fixed list does.
        order=Order.AS_CLOSED if gathered else Order.STATIC,
        overlap=settings.overlap_grad_reduce,
        max_bytes_in_flight=settings.reduce_budget,
        max_bytes_held=max(
            _of_two_units(units, sharding.reduces_on_gpu), settings.reduce_budget or 0
        ),
        check_finite=settings.report_nan_in_param_grad,
    )
    check = OrderCheck(sharding.dense, units, sharding.device) if settings.check_order else None
    ahead = int(settings.overlap_param_gather)
    if any(unit.gathered for unit in units):
        prefetcher = Prefetcher(units, ahead=ahead, budget=settings.gather_budget)
    else:  # a unit may run on some ranks only
        prefetcher = RegistrationOrder(units, ahead=ahead)
    buffers = sharding.module_buffers()
    engine = Engine(
        units,
        reducer,
        prefetcher,
        slots=sharding.slots,
        guards=Guards(
            look=ModuleWatch(
                (group for unit in units for group in unit.groups),
                wrapper,
                "Give it to fully_shard(model, optimizer) or fully_shard_optimizer(optimizer, "
                "model), or make it over model.parameters() before the first forward",
                left_alone,
            ).look,
            module_buffers=buffers if buffers.per_forward else None,
            order=check,
            reads=StorageCheck(sharding.pool).watching if settings.check_storage else nullcontext,
        ),
    )
    for each in hooks:
        each.start(engine)
    return engine


def _of_two_units(units: Sequence[Unit], of_gpu: bool) -> int:
    """Bytes of gradients of two units of the kind that a backward mostly consists of.

    These are the largest of a class that several units have. An embedding or a head may be larger
    than all of them. On a CPU its reduction then ends before the next unit's gradients are kept. On
    a GPU it goes on beside them: what the logits took is free by then.
    """
    classes = Counter(unit.module_class for unit in units)
    sizes = [
        (
            classes[unit.module_class] > 1,
            sum(group.trained.wire_bytes for group in unit.groups if group.requires_grad),
        )
        for unit in units
    ]
    usual, largest = max(sizes)[1], max(size for _, size in sizes)
    return usual + (largest if of_gpu else usual)


def updated_apart(refs: Iterable[ParameterRef], sharding: Sharding) -> dict[int, str]:
    """Names, by `id`, of the parameters that will get a main parameter beside them."""
    precision = sharding.settings.precision
    names: dict[int, str] = {}
    for ref in refs:
        placements = sharding.settings.strategy_of(ref.name).placements
        dtypes = precision.dtypes(ref.parameter.dtype, keep=precision.keeps(ref.name))
        trained = ref.parameter.requires_grad  # frozen ones have no other main weights
        updated = placements.optimizer_state if trained else placements.model_weights
        cut = any(placement.cuts for placement in sharding.axes_of(ref).effective(updated))
        elsewhere = sharding.encodes(ref) or sharding.offloaded
        if cut or elsewhere or (trained and dtypes.main != dtypes.weights):
            names[id(ref.parameter)] = ref.name
    return names


def without_values(settings: ShardingSettings) -> ShardingSettings:
    """Settings with which meta parameters get memory, and values that do not matter."""

    def fill(module: nn.Module) -> None:
        """Write zeros, which are values to whoever looks."""
        for parameter in module._parameters.values():
            if parameter is not None and not parameter.is_meta:
                parameter.zero_()

    return replace(settings, init_module=fill, sync_module_states=False)


# -- groups ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GroupPlan:
    """One group of a unit before it is made.

    `settings` are what the group has in common with others, `encoded` says whether its weights are
    gathered as codes, and `key` is its name in the pool.
    """

    refs: tuple[ParameterRef, ...]
    axes: DataParallelAxes
    layout: BufferLayout
    dtypes: GroupDtypes
    settings: GroupSettings
    encoded: bool
    key: tuple[object, ...]

    @property
    def trained(self) -> bool:
        """Whether the group's parameters have gradients; all of them have, or none."""
        return self.refs[0].parameter.requires_grad


def _plan_groups(plan: UnitPlan, sharding: Sharding) -> Iterator[_GroupPlan]:
    precision = sharding.settings.precision
    # What a user says by names comes first: these parameters may share a buffer at all.
    kinds: dict[tuple[bool, bool, Strategy], list[ParameterRef]] = {}
    for ref in plan.refs:
        strategy = sharding.settings.strategy_of(ref.name)
        kind = (precision.keeps(ref.name), sharding.encodes(ref), strategy)
        uncut = id(ref.parameter) in sharding.whole
        kinds.setdefault(kind, []).append(_uncut(ref) if uncut else ref)
    for (keep, encoded, strategy), chosen in kinds.items():
        settings = _group_settings(strategy, sharding)
        # Then what the parameters are: dtype, role, requires_grad.
        for key, refs in group_parameters(chosen):
            dtypes = precision.dtypes(key.dtype, keep=keep)
            single = sharding.settings.disable_bucketing
            for members in [[ref] for ref in refs] if single else [refs]:
                axes = sharding.axes_of(members[0])
                yield _GroupPlan(
                    tuple(members),
                    axes,
                    plan_layout(members, axes, settings),
                    dtypes,
                    settings,
                    encoded,
                    key=(plan.name, keep, encoded, members[0].name, *key.__dict__.values()),
                )


def _group_settings(strategy: Strategy, sharding: Sharding) -> GroupSettings:
    settings, device = sharding.settings, sharding.device
    common = GroupSettings(
        strategy,
        scale=None if settings.calculate_per_token_loss else 1.0 / sharding.dense.divisor,
        broadcast=settings.sync_module_states,
        reduction=settings.rank_sum,
        casts_in_gathers=True,
        release_gradients=True,
        exact_norm=settings.invariant,
        granularity=Granularity.tensor() if settings.keep_tensors_whole else None,
        device=device,
    )
    if not isinstance(settings.offload_policy, CPUOffloadPolicy):
        return common
    return replace(
        common,
        reduction=offloaded(settings.rank_sum, device, sharding.sides),
        casts_in_gathers=False,  # page-locked memory is copied as it is
        release_gradients=False,  # and kept
        kept_on=torch.device("cpu"),
        pinned=settings.offload_policy.pin_memory and device.type == "cuda",
    )


def _uncut(ref: ParameterRef) -> ParameterRef:
    """The same parameter as one block of rows (a row is a run of the last dimension)."""
    shape = ref.parameter.shape
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    return replace(ref, role=replace(ref.role, block_rows=max(rows, 1)))


def _check_gradient_dtypes(group: _GroupPlan) -> None:
    """Raise ValueError for main grads of a dtype that no reduction of a group writes.

    A reduction stores what it sends, or the fp32 sum of it; what replicas add up is fp32 already.
    The reproducible one keeps its sums apart, and rounds them to any dtype at the end.
    """
    if not group.trained or group.settings.reduction.cadence is not None:
        return
    axes, dtypes = group.axes, group.dtypes
    # The last sum is stored as it arrives: over replicas that is in fp32, else as it was sent.
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
        sizes = [group.layout.size * group.dtypes.weights.itemsize for group in planned]
        gathered[plan.name] = sum(sizes)
        for group in planned:
            sent = group.layout.size * group.dtypes.wire.itemsize
            if reductions is not None and group.trained and sent > reductions:
                raise ValueError(
                    f"reduce_budget={reductions} bytes, and gradients of {plan.name or 'the root'} "
                    f"are {sent} bytes on the wire: raise it, or choose smaller fsdp_unit_modules"
                )
    # A unit computes inside those around it, whose weights are whole meanwhile.
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
    plan: UnitPlan, groups: Sequence[_GroupPlan], sharding: Sharding, buffers_later: bool
) -> Unit:
    """Values for a unit's meta parameters, and buffers for all (collective)."""
    settings, device = sharding.settings, sharding.device
    layouts = [(group.refs, group.layout) for group in groups]
    # Unit by unit, so that no more than one is whole: the next one's values come when this one's
    # are shards.
    materialise_unit(plan, device, settings.init_module, layouts, buffers_later)
    move_buffers(plan.own_modules(), device)
    if settings.sync_module_states:
        sharding.module_buffers().start(plan.module, plan.own_modules())
    made = [
        ParameterGroup(
            group.refs,
            group.axes,
            group.dtypes,
            group.settings,
            sharding.scratch,
            partial(_make_weights, group, sharding),
        )
        for group in groups
    ]
    return Unit(
        plan.name,
        type(plan.module).__name__,
        made,
        members=len(plan.called),
        dress=LocalisedParameters.among(plan.refs),
    )


def _make_weights(
    group: _GroupPlan, sharding: Sharding, local: FlatBuffer, axes: DataParallelAxes
) -> Weights:
    """The weights of a group, of which this rank keeps `local` at rest."""
    codec = sharding.settings.precision.weight_codec
    if sharding.offloaded:
        return OffloadedWeights(local, axes, sharding.pool, group.key)
    if codec is not None and group.encoded:
        return EncodedWeights(local, axes, sharding.pool, group.key, group.dtypes.weights, codec)
    if any(local.cuts):
        return ShardedWeights(local, axes, sharding.pool, group.key, group.dtypes.weights)
    return WholeWeights(local, axes)
