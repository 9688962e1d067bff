"""`shard_module`: sharding module by module, as torch FSDP2's `fully_shard` is used.

Each call shards one module at once, so that an optimizer made afterwards sees sharded parameters.
The engine that runs all of them is made when the model is first used: only then is it known which
module is the outermost one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import OffloadPolicy

from lamina.buffers import ShardedTensor
from lamina.ddp.engine import (
    BufferPolicy,
    Engine,
    ParameterGroup,
    ParameterRef,
    UnavailableError,
    Unit,
    check_invariance,
    collect_parameters,
    refuse_wrapped,
    require_same_model,
)
from lamina.fsdp.api.build import Sharding, build_units, resolve, start_engine, without_values
from lamina.fsdp.compat import one_graph_break
from lamina.fsdp.module.sharded_module import (
    ShardedModule,
    adopt,
    remember_sharding,
)
from lamina.fsdp.settings.meshes import Mesh
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, policy_from
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.state.cut_regions import TensorRegions, show_parts
from lamina.fsdp.state.state_dicts import give_whole_tensors
from lamina.fsdp.units.dtensors import localise_dtensors
from lamina.fsdp.units.materialise import refuse_unwritten_buffers
from lamina.fsdp.units.plan import UnitPlan, refuse_container
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import check_arguments, named_mesh, translates

_P = ParamSpec("_P")
_ONE_STRATEGY = "fully_shard(model, optimizer, zero_dp_strategy=), as shard_module is ZeRO-3"
_FOREIGN = {
    "device_mesh": "mesh=",
    "optimizer": "an optimizer made over model.parameters() after the last shard_module",
    "mixed_precision_policy": "mp_policy=",
    "zero_dp_strategy": _ONE_STRATEGY,
    "fsdp_unit_modules": "shard_module on each such module, and then on the root",
    "shard_placement_fn": "granularity of rows, lamina.mesh.mark(parameter, block_rows=), where a "
    "cut must not separate some; shards are spans of elements and not of a dimension",
}
"""What `fully_shard` and torch's `fully_shard` are told, and what does the same here."""
_SHARDING = "_lamina_sharding"
"""What a call of `shard_module` keeps for the engine, which is made later."""


class ModuleWithUnit(ShardedModule):
    """Mixin of modules that `shard_module` was applied to: FSDP2's methods beside our own."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As for any module; the first call of the outermost one makes the engine."""
        _ = self.sharding_engine
        return super().__call__(*args, **kwargs)

    @property
    def sharding_engine(self) -> Engine:
        """The model's engine; asked of a module that has none, makes it the outermost one."""
        if not self._unit_hooks.started:
            _make_engine(self)
        return self._unit_hooks.engine

    def parameter_groups(self) -> Iterator[ParameterGroup]:
        """The groups of this module and of the sharded modules inside it."""
        _ = self.sharding_engine
        for unit in self.sharding_units():
            yield from unit.groups


class _ShardModule(Protocol[_P]):
    """The type of `shard_module`: of one module one comes back, of a list a list."""

    @overload
    def __call__(
        self, module: nn.Module, mesh: Mesh | None = None, *args: _P.args, **settings: _P.kwargs
    ) -> ModuleWithUnit: ...
    @overload
    def __call__(
        self, module: list[nn.Module], mesh: Mesh | None = None, *args: _P.args, **rest: _P.kwargs
    ) -> list[ModuleWithUnit]: ...


def _typed(
    function: Callable[Concatenate[nn.Module | list[nn.Module], Mesh | None, _P], object],
) -> _ShardModule[_P]:
    return cast("_ShardModule[_P]", function)


@_typed
@translates(_FOREIGN)
@check_arguments
def shard_module(
    module: nn.Module | list[nn.Module],
    mesh: Any = None,  # what is given in its place is told below what it should be
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: Any = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    device: torch.device | str | int | None = None,
    broadcast_buffers: BufferPolicy = "start",
) -> ModuleWithUnit | list[ModuleWithUnit]:
    """Shard one module's parameters, those of sharded modules inside it excepted (collective).

    Use it bottom-up, as torch's `fully_shard`: on each block, then on the root; then make the
    optimizer. Sharding is ZeRO-3, with replicas along the outer dimension of a 2-dimensional mesh.

    Args:
        module: the module; its parameters become `ShardedTensor`s at once. On the meta device they
            are initialised by `reset_parameters()`; a `to_empty` and an `init_weights` of the
            model's own may follow. Or a list of modules that are one unit: gathered when the first
            of them is called, released when all have run.
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
        broadcast_buffers: as of `fully_shard`. Each module says for itself whether its buffers
            are sent at the start; what the outermost one says of forwards holds for all.

    Returns:
        The module, whose class now also is a `ModuleWithUnit`; or the list of them.

    Raises:
        ValueError: for a mesh of more dimensions, a parameter tied to one of an inner unit, or a
            container without a forward; for an empty list, or modules inside one another.
        RuntimeError: if the module is wrapped or sharded already, by Lamina or another.
        TypeError: for an unknown policy.
        UnavailableError: for an integer that is not one of the two, or offloading where the process
            group cannot reach host memory.
        DisagreementError: for another module or setting than other ranks have.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> for block in (*model, model):
        ...     sharded = shard_module(block)
        >>> optimizer = torch.optim.AdamW(model.parameters())
    """
    if mesh is not None and not isinstance(mesh, ParallelMesh | DeviceMesh):
        raise TypeError(
            f"shard_module(module, {type(mesh).__name__}): the second argument is the mesh. Make "
            "the optimizer over model.parameters() after the last shard_module"
        )
    mesh = named_mesh(mesh)
    settings = ShardingSettings(
        device_mesh=mesh,
        **_dimensions(mesh),
        mixed_precision_policy=policy_from(mp_policy)
        or MixedPrecisionPolicy(main_params_dtype=None),
        offload_policy=offload_policy,
        device=device,
        broadcast_buffers=broadcast_buffers,
    )
    # By `id`: parameters compare element by element.
    ignored = {id(parameter) for parameter in ignored_params or ()}
    sharded = _shard(_listed(module), settings, reshard_after_forward, ignored)
    return sharded[0] if isinstance(module, nn.Module) else sharded


def _shard(
    modules: list[nn.Module],
    settings: ShardingSettings,
    reshard_after_forward: bool | int | None,
    ignored: Collection[int],
) -> list[ModuleWithUnit]:
    """Make one unit of modules; `ignored` are `id`s of parameters to leave alone."""
    # What they share is found as in a model that they are all of.
    around = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    for module in modules:
        localise_dtensors(module, ignored)
    sharding = resolve(around, settings, left_alone=ignored)
    # What inner calls have sharded is not this unit's, and nor is what was to be left alone.
    keep = _resharding(reshard_after_forward, sharding.dense.inner.size)
    inner = tuple(m for m in around.modules() if isinstance(m, ModuleWithUnit))
    own = tuple(_own(around, inner, ignored))
    require_same_model("shard_module", own, sharding.dense, sharding.expert, settings)
    plan = UnitPlan("", around, own, inner, tuple(modules))
    unit = build_units(around, [plan], sharding, buffers_later=True)[0].unit
    if keep is not None:
        unit.set_reshard_after_forward(keep)
    sharded = [adopt(module, ModuleWithUnit) for module in modules]
    for module in sharded:
        module.__dict__[_SHARDING] = sharding
    _show_parts(sharded, sharding)
    # Copies are sharded alike, and then get this module's values.
    blank = without_values(settings)

    def again(copies: list[nn.Module]) -> object:
        """Shard copies of the modules, without values."""
        # What was left alone has values, and what inner units hold is left out anyway.
        left_alone = {id(p) for module in copies for p in module.parameters() if not p.is_meta}
        return _shard(copies, blank, reshard_after_forward, left_alone)

    remember_sharding(sharded, again)
    return sharded


def _listed(given: nn.Module | list[nn.Module]) -> list[nn.Module]:
    """The modules to shard, once it is known that they can be."""
    modules = [given] if isinstance(given, nn.Module) else list(given)
    if not modules:
        raise ValueError("shard_module([]): name at least one module")
    for module in modules:
        refuse_wrapped("shard_module", module, (ModuleWithUnit,))
        refuse_container("", module)
        check_invariance("shard_module", module, False)
        if sum(module in list(other.modules()) for other in modules) > 1:
            raise ValueError(
                f"shard_module: {type(module).__name__} is inside another module of the list (or "
                "in it twice): list modules that do not hold each other"
            )
    return modules


def _dimensions(mesh: Mesh | None) -> dict[str, Any]:
    """Which dimensions of a DeviceMesh replicate and shard."""
    if not isinstance(mesh, DeviceMesh):
        return {}
    dims = mesh.mesh_dim_names or ()
    if len(dims) not in (1, 2):
        raise ValueError(
            f"shard_module needs a mesh of one or two named dimensions, and this one has "
            f"{dims or mesh.ndim}: name them, or pass a part such as mesh['replicate', 'shard']"
        )
    return {"dp_shard_dim": dims[-1], "dp_outer_dim": dims[0] if len(dims) == 2 else None}


def _resharding(value: bool | int | None, size: int) -> bool | None:
    """Whether to give weights back after forward, from what was asked and the ranks that shard."""
    if value is None or isinstance(value, bool):
        return value
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
    groups = [group for part in inner for group in part.sharding_unit.groups]
    compute = {id(p) for group in groups for p in group.compute_parameters}
    mains = {id(p) for group in groups for p in group.main_parameters}
    left_out = mains.union(ignored)
    refs = [ref for ref in collect_parameters(module) if id(ref.parameter) not in left_out]
    # Modules of inner units hold main parameters now. A compute parameter that is found here was
    # held by a module outside of them all the time.
    for ref in refs:
        if id(ref.parameter) in compute:
            raise ValueError(
                f"{ref.name} of {type(module).__name__} is tied to a parameter of a module inside "
                "it that was sharded on its own: shard the innermost module that holds both "
                "places instead, or let fully_shard() find the units"
            )
        if isinstance(ref.parameter.data, ShardedTensor):
            raise ValueError(
                f"{ref.name} of {type(module).__name__} is sharded already, with the module around "
                "it: shard_module goes bottom-up (blocks first, the root last), and the optimizer "
                "is made after it"
            )
    return refs


def _show_parts(modules: Sequence[ModuleWithUnit], sharding: Sharding) -> None:
    """Let `state_dict()` say which parts of the model's tensors tp has left on this rank."""
    unit = modules[0].sharding_unit
    regions = TensorRegions(unit.groups, sharding.model)
    # The ranks of a mesh that are not the world may be the data-parallel part of a larger one.
    partial = sharding.dense.size < dist.get_world_size()
    unplaced = [
        (group, index)
        for group in unit.groups
        for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True))
        if ref.role.tp_shard_dim is not None and regions.of(main) is None
    ]

    def refuse(*_: Any) -> None:
        """Refuse to save parts under the name of a whole."""
        group, index = unplaced[0]
        ref = group.refs[index]  # asked for now: the engine has renamed it meanwhile
        raise ValueError(
            f"{ref.name} is marked tp_shard_dim={ref.role.tp_shard_dim}, and the mesh that "
            "shard_module was given has no tensor-parallel ranks: every tp rank's piece would be "
            "saved under one name, as if it were the whole. Give shard_module the ParallelMesh, or "
            "use fully_shard(device_mesh=, tp_dim=)"
        )

    for module in modules:
        show_parts(module, regions)
        give_whole_tensors(module, always=False)
        if unplaced and partial and not isinstance(sharding.mesh, ParallelMesh):
            module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]


@one_graph_break  # torch.compile(model) may be what makes the first call
def _make_engine(root: ModuleWithUnit) -> None:
    """Join what was sharded in and below `root` under one engine."""
    modules = {n: m for n, m in root.named_modules() if isinstance(m, ModuleWithUnit)}
    paths: dict[Unit, dict[int, str]] = {}
    for name, module in modules.items():
        if (hooks := module._unit_hooks).started:
            raise RuntimeError(
                f"{name} was called, or asked for its engine, before {type(root).__name__} around "
                "it: run (or inspect) the outermost sharded module first"
            )
        paths.setdefault(hooks.unit, {})[hooks.member] = name
    # Until now units have had the names that parameters have in their own modules.
    for unit, members in paths.items():
        if len(members) < unit.calls.members:
            here = f"this {type(root).__name__}"
            raise RuntimeError(
                f"{members.popitem()[1] or here} is one unit with modules outside of {here}: run "
                "(or inspect) the sharded module around all of them first"
            )
        unit.rename(members)
    refuse_unwritten_buffers(root)
    # The outermost module's settings count for the engine, and all units reduce from one scratch.
    first, *others = [module.__dict__[_SHARDING] for module in modules.values()]
    for other in others:
        other.scratch.share(first.scratch)
    left_alone = {key for each in (first, *others) for key in each.left_alone}
    hooks_of_all = [module._unit_hooks for module in modules.values()]
    start_engine(hooks_of_all, first, "shard_module", left_alone)
