"""`shard_module`: sharding module by module, as torch FSDP2's `fully_shard` is used.

Each call shards one module at once, so that an optimizer made afterwards sees sharded parameters.
The engine that runs all of them is made when the model is first used: only then is it known which
module is the outermost one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from lamina.buffers import StoragePool
from lamina.ddp.engine import (
    GradientReducer,
    Order,
    ParameterGroup,
    ParameterRef,
    TransientBuffers,
    collect_parameters,
    resolve_strategy,
)
from lamina.fsdp.api.build import ShardingSettings, check_copies, check_gradient_dtypes, make_unit
from lamina.fsdp.api.keywords import ShardModuleSettings
from lamina.fsdp.execution.engine import ShardingEngine
from lamina.fsdp.execution.hooks import PART, attach_hooks, rest_for_state_dicts
from lamina.fsdp.execution.unit import Unit
from lamina.fsdp.module.sharded_module import ShardedModule, is_sharded
from lamina.fsdp.settings.hardware_limits import UnavailableError
from lamina.fsdp.settings.meshes import (
    MeshArguments,
    ModelAxes,
    computing_device,
    model_axes,
    resolve_meshes,
)
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, policy_from
from lamina.fsdp.state.cut_regions import Regions, beside_parts, show_parts
from lamina.fsdp.units.casting import cast_buffers, keep_modules
from lamina.fsdp.units.dtensors import localise_dtensors
from lamina.fsdp.units.plan import UnitPlan, refuse_container
from lamina.fsdp.weights.offloaded import resolve_offload
from lamina.mesh import ParallelLayout, ParallelMesh

if TYPE_CHECKING:
    from typing import Unpack  # Python 3.11

__all__ = ["ModuleWithUnit", "SharedBuffers", "rename", "shard_module"]

_ENGINE = "_lamina_engine"


class SharedBuffers(TransientBuffers):
    """Buffers of one unit until the engine is made, then those of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: TransientBuffers | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As of `TransientBuffers`."""
        shared = self.shared
        own = super().take
        return (own if shared is None else shared.take)(numel, dtype, device)

    def give(self, tensor: torch.Tensor) -> None:
        """As of `TransientBuffers`."""
        (super().give if self.shared is None else self.shared.give)(tensor)

    def clear(self) -> None:
        """As of `TransientBuffers`."""
        (super().clear if self.shared is None else self.shared.clear)()


@dataclass
class _Part:
    """What one call of `shard_module` made of its modules."""

    unit: Unit
    settings: ShardingSettings
    buffers: SharedBuffers = field(default_factory=SharedBuffers)
    member: int = 0
    """Which of them; the others hold a part of the same unit."""


class ModuleWithUnit(ShardedModule):
    """Mixin of modules that `shard_module` was applied to: FSDP2's methods beside our own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module; the first call of the outermost one makes the engine."""
        if _ENGINE not in self.__dict__:
            _make_engine(self)
        return super().__call__(*args, **kwargs)

    @property
    def sharding_engine(self) -> ShardingEngine:
        """The model's engine; asked of a module that has none, makes it the outermost one."""
        if _ENGINE not in self.__dict__:
            _make_engine(self)
        engine: ShardingEngine = self.__dict__[_ENGINE]
        return engine

    @property
    def sharding_unit(self) -> Unit:
        """This module's own unit."""
        return _part(self).unit

    def sharding_units(self, recurse: bool = True) -> Iterator[Unit]:
        """This module's own unit and (`recurse`) those of the sharded modules inside it."""
        modules = self.modules() if recurse else (self,)
        units = (m.sharding_unit for m in modules if isinstance(m, ModuleWithUnit))
        yield from dict.fromkeys(units)

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """The groups of this module and of the sharded modules inside it."""
        _ = self.sharding_engine
        for unit in self.sharding_units():
            yield from unit.groups


@overload
def shard_module(
    module: nn.Module,
    mesh: ParallelMesh | DeviceMesh | None = None,
    **settings: Unpack[ShardModuleSettings],
) -> ModuleWithUnit: ...
@overload
def shard_module(
    module: list[nn.Module],
    mesh: ParallelMesh | DeviceMesh | None = None,
    **settings: Unpack[ShardModuleSettings],
) -> list[ModuleWithUnit]: ...
def shard_module(
    module: nn.Module | list[nn.Module],
    mesh: ParallelMesh | DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | None = None,
) -> ModuleWithUnit | list[ModuleWithUnit]:
    """Shard one module's parameters, those of sharded modules inside it excepted (collective).

    Use it bottom-up, as torch's `fully_shard`: on each block, then on the root; then make the
    optimizer. Sharding is ZeRO-3, with replicas along the outer dimension of a 2-dimensional mesh.

    Args:
        module: the module; its parameters become `ShardedTensor`s at once. On the meta device they
            are initialised by `reset_parameters()` (no `to_empty` afterwards). Or a list of modules
            that are one unit: gathered when the first of them is called, released when all have
            run.
        mesh: one dimension shards; two replicate and shard; None is the whole world.
        reshard_after_forward: give whole weights back after forward and gather them again for
            backward. None means True, and False for the outermost module. The block whose backward
            comes first keeps them either way. As an integer only 1 (False) and the size of the
            sharding dimension (True) are known.
        mp_policy: torch's `MixedPrecisionPolicy` or Lamina's.
        offload_policy: torch's `CPUOffloadPolicy()`: shards, gradients and optimizer state in host
            memory; `OffloadPolicy()` or None for none.
        ignored_params: parameters to leave alone, gradients included.
        device: where the module computes, and is moved to; by default the mesh's device.

    Returns:
        The module, whose class now also is a `ModuleWithUnit`; or the list of them.

    Raises:
        ValueError: for a mesh of more dimensions, a parameter tied to one of an inner unit, or a
            container without a forward; for an empty list, or modules inside one another.
        RuntimeError: if the module is sharded already.
        TypeError: for an unknown policy.
        UnavailableError: for an integer that is not one of the two, or offloading where the process
            group cannot reach host memory.
    """
    modules = _listed(module)
    # What they share is found as in a model that they are all of.
    around = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    for one in modules:
        localise_dtensors(one, ignored)
    if mesh is None:
        mesh = ParallelLayout().build()
    settings = _settings(around, mesh, mp_policy, offload_policy, device)
    keep = _resharding(reshard_after_forward, settings)
    inner = tuple(m for m in around.modules() if isinstance(m, ModuleWithUnit))
    plan = UnitPlan("", around, tuple(_own(around, inner, ignored)), inner)
    check_copies(plan, settings)
    check_gradient_dtypes(plan, settings)
    buffers = SharedBuffers()
    keep_modules(plan.own_modules(), plan.refs, settings.precision)
    unit = make_unit(plan, settings, buffers, StoragePool(settings.device))
    own = set(map(id, plan.own_modules()))
    cast_buffers(((n, m) for n, m in around.named_modules() if id(m) in own), settings.precision)
    unit.reshard_after_forward = keep is not False
    unit.explicit_reshard = keep is not None
    unit.members = len(modules)
    unit.reshard()
    sharded = [
        _adopt(one, _Part(unit, settings, buffers, member)) for member, one in enumerate(modules)
    ]
    first = weakref.ref(sharded[0])
    rest_for_state_dicts(sharded, unit, lambda: _engine_of(first))
    _show_parts(sharded, mesh)
    return sharded[0] if isinstance(module, nn.Module) else sharded


def _listed(given: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """The modules to shard, once it is known that they can be."""
    modules = [given] if isinstance(given, nn.Module) else list(given)
    if not modules:
        raise ValueError("shard_module([]): name at least one module")
    for module in modules:
        if is_sharded(module):
            raise RuntimeError(
                f"{type(module).__name__} is sharded already: shard each module once"
            )
        refuse_container("", module)
        if sum(module in list(other.modules()) for other in modules) > 1:
            raise ValueError(
                f"shard_module: {type(module).__name__} is inside another module of the list (or "
                "in it twice): list modules that do not hold each other"
            )
    return modules


def _settings(
    module: nn.Module,
    mesh: ParallelMesh | DeviceMesh,
    mp_policy: Any,
    offload_policy: OffloadPolicy | None,
    device: torch.device | str | None,
) -> ShardingSettings:
    names: dict[str, Any] = {}
    if isinstance(mesh, DeviceMesh):
        dims = mesh.mesh_dim_names or ()
        if len(dims) not in (1, 2):
            raise ValueError(
                f"shard_module needs a mesh of one or two named dimensions, and this one has "
                f"{dims or mesh.ndim}: name them, or pass a part such as mesh['replicate', 'shard']"
            )
        names = {"dp_shard_dim": dims[-1], "dp_outer_dim": dims[0] if len(dims) == 2 else None}
    dense, expert = resolve_meshes(MeshArguments(mesh, **names))
    refs = collect_parameters(module)
    known = model_axes(MeshArguments(mesh)) if isinstance(mesh, ParallelMesh) else ModelAxes()
    dense = beside_parts(dense, refs, known)
    expert = None if expert is None else beside_parts(expert, refs, known)
    place = computing_device(module, mesh, device)
    return ShardingSettings(
        strategy=resolve_strategy(3),
        dense=dense,
        expert=expert,
        model=model_axes(MeshArguments(mesh)),
        precision=policy_from(mp_policy) or MixedPrecisionPolicy(main_params_dtype=None),
        offload=resolve_offload(offload_policy, place, dense),
        device=place,
    )


def _resharding(value: bool | int | None, settings: ShardingSettings) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    size = settings.dense.inner.size
    if value in (1, size):
        return value == size
    raise UnavailableError(
        f"reshard_after_forward={value}: weights are given back to all {size} ranks or to none; "
        f"use True (or {size}), False (or 1), or a 2-dimensional mesh with smaller shards"
    )


def _own(
    module: nn.Module, inner: Sequence[ModuleWithUnit], ignored: Collection[int]
) -> list[ParameterRef]:
    """The module's parameters, without those of inner units and those to ignore."""
    left_out = set(ignored)
    compute: set[int] = set()
    for part in inner:
        for group in part.sharding_unit.groups:
            compute.update(map(id, group.compute_parameters))
            left_out.update(map(id, group.main_parameters))
    refs = [ref for ref in collect_parameters(module) if id(ref.parameter) not in left_out]
    for ref in refs:
        if id(ref.parameter) in compute:
            raise ValueError(
                f"{ref.name} of {type(module).__name__} is tied to a parameter of a module inside "
                "it that was sharded on its own: shard the innermost module that holds both "
                "places instead, or let fully_shard() find the units"
            )
    return refs


def _adopt(module: nn.Module, part: _Part) -> ModuleWithUnit:
    cls = type(module)
    module.__class__ = type(f"Sharded{cls.__name__}", (ModuleWithUnit, cls), {})
    module.__dict__[PART] = part
    return cast(ModuleWithUnit, module)


def _engine_of(reference: weakref.ref[ModuleWithUnit]) -> ShardingEngine | None:
    module = reference()
    return None if module is None else module.__dict__.get(_ENGINE)


def _show_parts(modules: Sequence[ModuleWithUnit], mesh: ParallelMesh | DeviceMesh) -> None:
    """Let `state_dict()` say which parts of the model's tensors tp has left on this rank."""
    known = isinstance(mesh, ParallelMesh)
    unit = modules[0].sharding_unit
    regions = Regions(unit.groups, model_axes(MeshArguments(mesh)) if known else ModelAxes())
    for module in modules:
        show_parts(module, regions)
    if known or _part(modules[0]).settings.dense.size == dist.get_world_size():
        return
    unplaced = [
        (group, index)
        for group in unit.groups
        for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True))
        if ref.role.tp_shard_dim is not None and regions.of(main) is None
    ]

    def refuse(*_: Any) -> None:
        group, index = unplaced[0]
        raise ValueError(
            f"{group.refs[index].name} is marked tp_shard_dim={group.refs[index].role.tp_shard_dim}"
            ", and the mesh that shard_module was given has no tensor-parallel ranks: every tp "
            "rank's piece would be saved under one name, as if it were the whole. Give "
            "shard_module the ParallelMesh, or use fully_shard(device_mesh=, tp_dim=)"
        )

    for module in modules if unplaced else ():
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def _part(module: nn.Module) -> _Part:
    part: _Part = module.__dict__[PART]
    return part


# -- the engine -------------------------------------------------------------------------------


def _make_engine(root: ModuleWithUnit) -> None:
    """Join the parts in and below `root` under one engine."""
    modules = {n: m for n, m in root.named_modules() if isinstance(m, ModuleWithUnit)}
    for name, module in modules.items():
        if _ENGINE in module.__dict__:
            raise RuntimeError(
                f"{name} was called, or asked for its engine, before {type(root).__name__} around "
                "it: run (or inspect) the outermost sharded module first"
            )
    parts = {name: _part(module) for name, module in modules.items()}
    shared = TransientBuffers()
    paths: dict[Unit, dict[int, str]] = {}
    for name, part in parts.items():
        paths.setdefault(part.unit, {})[part.member] = name
        part.buffers.shared = shared
    for unit, members in paths.items():
        if len(members) < unit.members:
            raise RuntimeError(
                f"{members.popitem()[1] or type(root).__name__} is one unit with modules that are "
                f"not in {type(root).__name__}: run (or inspect) the sharded module around all of "
                "them first"
            )
        unit.name = next(iter(members.values()))
        for group in unit.groups:
            rename(group, members)
    if not parts[""].unit.explicit_reshard:
        parts[""].unit.reshard_after_forward = False
    units = list(paths)
    trained = [group for unit in units for group in unit.groups if group.requires_grad]
    cadence = parts[""].settings.strategy.cadence
    reducer = GradientReducer(trained[::-1], cadence, shared, order=Order.AS_CLOSED)
    engine = ShardingEngine(units, reducer)
    for name, module in modules.items():
        policy = parts[name].settings.precision
        attach_hooks(
            module,
            engine,
            parts[name].unit,
            input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
            output_dtype=policy.output_dtype,
            member=parts[name].member,
        )
        module.__dict__[_ENGINE] = engine


def rename(group: ParameterGroup, members: Mapping[int, str]) -> None:
    """Give a group's parameters their names in the whole model, which were not known before.

    Args:
        group: the group; of a list of modules, its names begin with the module's number.
        members: the path of each module of its unit.
    """

    def whole(name: str) -> str:
        path = members.get(0, "")
        if len(members) > 1:
            number, name = name.split(".", 1)
            path = members[int(number)]
        return f"{path}.{name}" if path else name

    group.refs = tuple(replace(ref, name=whole(ref.name)) for ref in group.refs)
