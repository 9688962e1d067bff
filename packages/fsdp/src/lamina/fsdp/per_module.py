"""`shard_module`: sharding module by module, as torch FSDP2's `fully_shard` is used.

Each call shards one module at once, so that an optimizer made afterwards sees sharded parameters.
The engine that runs all of them is made when the model is first used: only then is it known which
module is the outermost one.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers import BufferLayout, StoragePool
from lamina.ddp import (
    GradientReducer,
    Order,
    ParameterGroup,
    ParameterRef,
    TransientBuffers,
    collect_parameters,
    resolve_strategy,
)
from lamina.fsdp.casting import cast_buffers, keep_modules
from lamina.fsdp.engine import ShardingEngine
from lamina.fsdp.hooks import attach_hooks, rest_for_state_dicts
from lamina.fsdp.limits import UnavailableError
from lamina.fsdp.meshes import (
    MeshArguments,
    ModelAxes,
    computing_device,
    model_axes,
    resolve_meshes,
)
from lamina.fsdp.module import ShardedModule, is_sharded
from lamina.fsdp.offload import resolve_offload
from lamina.fsdp.precision import MixedPrecisionPolicy, policy_from
from lamina.fsdp.regions import Regions, show_parts
from lamina.fsdp.sharding import ShardingSettings, check_gradient_dtypes, make_unit
from lamina.fsdp.tensor_parallel import localise_dtensors
from lamina.fsdp.unit import Unit
from lamina.fsdp.units import UnitPlan, refuse_container
from lamina.mesh import ParallelLayout, ParallelMesh

__all__ = ["ModuleWithUnit", "shard_module"]

_PART = "_lamina_part"
_ENGINE = "_lamina_engine"


class _SharedBuffers(TransientBuffers):
    """Buffers of one unit until the engine is made, then those of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: TransientBuffers | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        shared = self.shared
        own = super().take
        return (own if shared is None else shared.take)(numel, dtype, device)

    def give(self, tensor: torch.Tensor) -> None:
        (super().give if self.shared is None else self.shared.give)(tensor)

    def clear(self) -> None:
        (super().clear if self.shared is None else self.shared.clear)()


@dataclass
class _Part:
    """What one call of `shard_module` made."""

    unit: Unit
    settings: ShardingSettings
    buffers: _SharedBuffers = field(default_factory=_SharedBuffers)


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
        for module in self.modules() if recurse else (self,):
            if isinstance(module, ModuleWithUnit):
                yield module.sharding_unit

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """The groups of this module and of the sharded modules inside it."""
        _ = self.sharding_engine
        for unit in self.sharding_units():
            yield from unit.groups


def shard_module(
    module: nn.Module,
    mesh: ParallelMesh | DeviceMesh | None = None,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | None = None,
) -> ModuleWithUnit:
    """Shard one module's parameters, those of sharded modules inside it excepted (collective).

    Use it bottom-up, as torch's `fully_shard`: on each block, then on the root; then make the
    optimizer. Sharding is ZeRO-3, with replicas along the outer dimension of a 2-dimensional mesh.

    Args:
        module: the module; its parameters become `ShardedTensor`s at once. On the meta device they
            are initialised by `reset_parameters()` (no `to_empty` afterwards).
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
        The module, whose class now also is a `ModuleWithUnit`.

    Raises:
        ValueError: for a mesh of more dimensions, a parameter tied to one of an inner unit, or a
            container without a forward.
        RuntimeError: if the module is sharded already.
        TypeError: for an unknown policy.
        UnavailableError: for an integer that is not one of the two, or offloading where the process
            group cannot reach host memory.
    """
    if is_sharded(module):
        raise RuntimeError(f"{type(module).__name__} is sharded already: shard each module once")
    refuse_container("", module)
    ignored = {id(parameter) for parameter in ignored_params or ()}
    localise_dtensors(module, ignored)
    if mesh is None:
        mesh = ParallelLayout().build("cuda" if torch.cuda.is_available() else "cpu")
    settings = _settings(module, mesh, mp_policy, offload_policy, device)
    keep = _resharding(reshard_after_forward, settings)
    inner = tuple(m for m in module.modules() if isinstance(m, ModuleWithUnit))
    plan = UnitPlan("", module, tuple(_own(module, inner, ignored)), inner)
    check_gradient_dtypes(plan, settings)
    buffers = _SharedBuffers()
    keep_modules(plan.own_modules(), plan.refs, settings.precision)
    unit = make_unit(plan, settings, buffers, StoragePool(settings.device))
    own = set(map(id, plan.own_modules()))
    cast_buffers(((n, m) for n, m in module.named_modules() if id(m) in own), settings.precision)
    unit.reshard_after_forward = keep is not False
    unit.explicit_reshard = keep is not None
    unit.reshard()
    sharded = _adopt(module, _Part(unit, settings, buffers))
    _show_parts(sharded, mesh)
    return sharded


def _settings(
    module: nn.Module,
    mesh: ParallelMesh | DeviceMesh,
    mp_policy: Any,
    offload_policy: Any,
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
    place = computing_device(module, mesh, device)
    return ShardingSettings(
        strategy=resolve_strategy(3),
        dense=dense,
        expert=expert,
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
    module.__dict__[_PART] = part
    held = weakref.ref(module)

    def engine() -> ShardingEngine | None:
        found = held()
        return None if found is None else found.__dict__.get(_ENGINE)

    rest_for_state_dicts(module, part.unit, engine)
    unit = weakref.ref(part.unit)

    def after_load(_: nn.Module, __: Any) -> None:
        if (found := unit()) is not None:
            for group in found.groups:
                group.weights.mark_changed()

    module.register_load_state_dict_post_hook(after_load)  # type: ignore[no-untyped-call]
    return cast(ModuleWithUnit, module)


def _show_parts(module: ModuleWithUnit, mesh: ParallelMesh | DeviceMesh) -> None:
    """Let `state_dict()` say which parts of the model's tensors tp has left on this rank."""
    known = isinstance(mesh, ParallelMesh)
    unit = module.sharding_unit
    regions = Regions(unit.groups, model_axes(MeshArguments(mesh)) if known else ModelAxes())
    show_parts(module, regions)
    if known or _part(module).settings.dense.size == dist.get_world_size():
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

    if unplaced:
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


def _part(module: nn.Module) -> _Part:
    part: _Part = module.__dict__[_PART]
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
    canonical = parts[""].settings.dense
    for name, part in parts.items():
        part.unit.name = name
        part.buffers.shared = shared
        for group in part.unit.groups:
            _rename(group, f"{name}." if name else "")
            if group.axes == canonical:
                group.axes = canonical  # one object, so that small collectives are joined
    if not parts[""].unit.explicit_reshard:
        parts[""].unit.reshard_after_forward = False
    units = [part.unit for part in parts.values()]
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
        )
        module.__dict__[_ENGINE] = engine


def _rename(group: ParameterGroup, prefix: str) -> None:
    """Give a group's parameters their names in the whole model, which were not known before."""
    if not prefix:
        return
    group.refs = tuple(replace(ref, name=prefix + ref.name) for ref in group.refs)
    specs = [replace(spec, name=prefix + spec.name) for spec in group.layout.specs]
    settings = group.settings
    layout = BufferLayout.plan(specs, group.axes.size, settings.alignment, settings.shard_multiple)
    group.layout = group.weights.local.layout = layout
    if group.main is not None:
        group.main.layout = layout
    if group.gradients is not None:
        group.gradients.layout = group.gradients.main.layout = layout
