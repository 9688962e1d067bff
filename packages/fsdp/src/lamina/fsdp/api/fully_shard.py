"""`fully_shard`: one line between a plain PyTorch loop and a sharded one."""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.ddp.engine import (
    UnavailableError,
    adopt_optimizer,
    answer_scalers,
    check_invariance,
    collect_parameters,
    refuse_optimizer,
    refuse_wrapped,
    require_same_model,
    show_decoupled,
)
from lamina.fsdp.api.build import (
    build_units,
    resolve,
    start_engine,
    updated_apart,
    without_values,
)
from lamina.fsdp.module.sharded_module import (
    ShardedModule,
    WatchedModule,
    adopt,
    remember_sharding,
)
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.state.cut_regions import (
    TensorRegions,
    refuse_looking_at_part,
    refuse_parts,
    regions_of,
    show_parts,
)
from lamina.fsdp.state.state_dicts import (
    give_whole_tensors,
    gives_whole_tensors,
    prepare_optimizer_state,
)
from lamina.fsdp.units.casting import check_patterns
from lamina.fsdp.units.dtensors import localise_dtensors, point_at_localised
from lamina.fsdp.units.materialise import refuse_uninitialised
from lamina.fsdp.units.plan import plan_units, refine
from lamina.mesh import ParallelMesh
from lamina.mesh.engine import require_overlap, translates

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
_P = ParamSpec("_P")
_TRANSPOSES = "keep_fp8_transpose_cache"
_PER_MODULE = "shard_module(module, mesh, {}), which goes module by module as FSDP2 does"
_LEAVE_OUT = "nothing in its place; leave it out"
_FOREIGN = {
    "mesh": "device_mesh=",
    "process_group": "device_mesh=, such as DeviceMesh.from_group(group, device_type)",
    "mp_policy": "mixed_precision_policy=",
    "mixed_precision": "mixed_precision_policy=",
    "ignored_params": _PER_MODULE.format("ignored_params="),
    "ignored_modules": _PER_MODULE.format("ignored_params="),
    "ignored_states": _PER_MODULE.format("ignored_params="),
    "shard_placement_fn": "lamina.mesh.mark(parameter, block_rows=) where a cut must not separate "
    "rows; shards are spans of elements and not of a dimension",
    "auto_wrap_policy": "fsdp_unit_modules=[Block, ...]",
    "sharding_strategy": "zero_dp_strategy=3 (FULL_SHARD), 2 (SHARD_GRAD_OP) or 0 (NO_SHARD)",
    "stage": "zero_dp_strategy=",
    "zero_stage": "zero_dp_strategy=",
    "data_parallel_sharding_strategy": "zero_dp_strategy=",
    "cpu_offload": "offload_policy=CPUOffloadPolicy() of torch.distributed.fsdp",
    "device_id": "device=",
    "param_init_fn": "init_module=",
    "use_orig_params": f"{_LEAVE_OUT}: parameters keep their names and groups in any case",
    "limit_all_gathers": "gather_budget=bytes",
    "forward_prefetch": "overlap_param_gather=",
    "backward_prefetch": "overlap_param_gather=",
}
"""What peers' functions are told, and what does the same here."""


class _FullyShard(Protocol[_P]):
    """The type of `fully_shard`: with an optimizer, both come back."""

    @overload
    def __call__(
        self, module: nn.Module, optimizer: None = None, *args: _P.args, **settings: _P.kwargs
    ) -> ShardedModule: ...
    @overload
    def __call__(
        self, module: nn.Module, optimizer: OptimizerT, *args: _P.args, **settings: _P.kwargs
    ) -> tuple[ShardedModule, OptimizerT]: ...


class _FullyShardModel(Protocol[_P]):
    """The type of `fully_shard_model`: it takes the same settings."""

    def __call__(
        self, module: nn.Module, *args: _P.args, **settings: _P.kwargs
    ) -> ShardedModule: ...


_TEXTS = "    settings: the fields of `ShardingSettings`, each by its name."
"""The line of `fully_shard`'s docstring in whose place the fields' texts come."""


def _takes(
    kind: Callable[_P, ShardingSettings],
) -> Callable[[Callable[..., object]], _FullyShard[_P]]:
    """Give a function the fields of a dataclass as keywords: signature, types and help."""

    def decorate(function: Callable[..., object]) -> _FullyShard[_P]:
        """Give one function the fields' keywords, their texts, and remedies for other names."""
        *own, _ = inspect.signature(function).parameters.values()
        keywords = inspect.signature(kind).parameters.values()
        function.__signature__ = inspect.Signature([*own, *keywords])  # type: ignore[attr-defined]
        if function.__doc__ and kind.__doc__:  # `python -OO` has neither
            # Docstrings have their indentation in Python 3.11 and 3.12, and none from 3.13 on.
            given = inspect.cleandoc(kind.__doc__)
            texts = given.partition("\nAttributes:\n")[2].partition("\n\nRaises:")[0]
            function.__doc__ = inspect.cleandoc(function.__doc__).replace(_TEXTS, texts)
        return cast("_FullyShard[_P]", translates(_FOREIGN)(function))

    return decorate


def _with_settings_of(
    _: _FullyShard[_P],
) -> Callable[[Callable[..., ShardedModule]], _FullyShardModel[_P]]:
    return lambda function: function


@_takes(ShardingSettings)
def fully_shard(
    module: nn.Module, optimizer: Optimizer | None = None, **settings: Any
) -> ShardedModule | tuple[ShardedModule, Optimizer]:
    """Shard a model (and its optimizer) over the data-parallel ranks, in place.

    The training loop stays plain PyTorch: `loss.backward(); optimizer.step();
    optimizer.zero_grad()`. Between steps, parameters and gradients are `ShardedTensor`s of global
    shape where the strategy shards them; `torch.nn.utils.clip_grad_norm_` gives the global norm
    (with tp, ep or pp `lamina.ddp.clip_grad_norm` does).

    Args:
        module: the whole model; on the meta device it is materialised unit by unit.
        optimizer: any torch optimizer over the module's parameters. The object stays the same one:
            its groups and schedulers stay attached, its parameters are re-pointed.
        settings: the fields of `ShardingSettings`, each by its name.

    Returns:
        `module`, whose class now also is a `ShardedModule`; with an optimizer, both.

    Raises:
        ValueError: for unknown strategies, units or mesh dimensions, and arguments that exclude
            or need each other.
        UnavailableError: for what this machine lacks.
        RuntimeError: if the module, or part of it, is wrapped or sharded already, by Lamina or by
            another library.
        DisagreementError: for another model, optimizer or setting than other ranks have.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer = fully_shard(model, optimizer, zero_dp_strategy=3)
        >>> model(torch.ones(2, 8)).mean().backward()
        >>> optimizer.step()
    """
    sharded = _shard(module, optimizer, ShardingSettings(**settings))
    if optimizer is None:
        return sharded
    return _Both((sharded, fully_shard_optimizer(optimizer, sharded)))


class _Both(tuple[ShardedModule, Optimizer]):
    """A model and its optimizer. Whoever takes it for the model is told to unpack it."""

    __slots__ = ()

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(_UNPACK)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no {name!r}: {_UNPACK}")


_UNPACK = (
    "fully_shard(model, optimizer) has returned a tuple of both: write "
    "model, optimizer = fully_shard(model, optimizer)"
)


@_with_settings_of(fully_shard)
def fully_shard_model(module: nn.Module, **settings: Any) -> ShardedModule:
    """Shard a model's parameters and gradients, in place; settings as of `fully_shard`.

    Examples:
        >>> model = fully_shard_model(torch.nn.Linear(8, 1))
        >>> optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    """
    return fully_shard(module, None, **settings)


def _shard(
    module: nn.Module,
    optimizer: Optimizer | None,
    settings: ShardingSettings,
) -> ShardedModule:
    """Shard a model; `optimizer` is looked at, and not changed yet."""
    # All that can be refused is refused first, while the model is still the user's.
    _check_kinds(module, optimizer)
    refuse_wrapped("fully_shard", module)
    check_invariance("fully_shard", module, settings.invariant)
    if settings.overlap_grad_reduce or settings.overlap_param_gather:
        require_overlap("fully_shard(overlap_grad_reduce=, overlap_param_gather=)")
    if optimizer is not None:  # an earlier call may have been refused half-way
        point_at_localised(optimizer, module)
    check_patterns(module, settings)
    sharding = resolve(module, settings, optimizer)
    refs = collect_parameters(module)
    require_same_model("fully_shard", refs, sharding.dense, sharding.expert, settings, optimizer)
    transposing = _with_transposes(module) if settings.keep_fp8_transpose_cache else []
    if optimizer is not None:
        known = {id(ref.parameter) for ref in refs}
        apart, invariant = updated_apart(refs, sharding), settings.invariant
        refuse_optimizer(optimizer, known, apart, invariant=invariant)
    whole = not settings.preproc_state_dict_for_dcp_ckpt
    refuse_parts(refs, sharding.model, optimizer, whole=whole)
    # From here on it is changed: DTensors become local, units get buffers, hooks and an engine.
    localise_dtensors(module)
    plans = plan_units(module, settings.fsdp_unit_modules)
    refuse_uninitialised(module, settings.init_module)
    if settings.enable_fine_grained_param_gather:
        plans = refine(module, plans)
    start_engine(build_units(module, plans, sharding), sharding, "fully_shard")
    sharded = adopt(module, WatchedModule if settings.check_storage else ShardedModule)
    for child in transposing:
        setattr(child, _TRANSPOSES, True)
    sharded.set_model_auto_sync(settings.sync_model_each_microbatch)
    if settings.reshard_after_forward is not None:
        sharded.set_reshard_after_forward(settings.reshard_after_forward)
    groups = list(sharded.parameter_groups())
    if settings.use_decoupled_grad:
        show_decoupled(main for group in groups for main in group.main_parameters)
    # What its state dictionaries hold, and how a copy of it is sharded.
    if not whole:
        show_parts(sharded, TensorRegions(groups, sharding.model))
    give_whole_tensors(sharded, always=whole)
    blank = without_values(settings)
    remember_sharding([sharded], lambda copies: _shard(copies[0], None, blank))
    return sharded


def _check_kinds(module: object, optimizer: object) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"fully_shard({type(module).__name__}, ...): the first argument is the module itself, "
            "and not its parameters() or a list"
        )
    if isinstance(optimizer, ParallelMesh | DeviceMesh):
        raise TypeError(
            f"fully_shard(module, {type(optimizer).__name__}): the second argument is the "
            "optimizer. Name the mesh, fully_shard(module, optimizer, device_mesh=mesh), or shard "
            "module by module with shard_module(module, mesh)"
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        given = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            f"fully_shard(module, {given}): the second argument is an optimizer that is made "
            "already, such as torch.optim.AdamW(module.parameters(), lr=1e-3)"
        )


def _with_transposes(module: nn.Module) -> list[nn.Module]:
    """The modules that multiply in FP8 and can keep their transposed weights until backward."""
    able = [child for child in module.modules() if hasattr(child, _TRANSPOSES)]
    if not able:
        raise UnavailableError(
            f"{_TRANSPOSES}=True: no module of {type(module).__name__} multiplies in FP8 (none has "
            f"an attribute {_TRANSPOSES}), so there is no transpose to keep: use layers that do, "
            "such as lamina.models with Precision(backend='torch-fp8'), or leave it False"
        )
    return able


def fully_shard_optimizer(optimizer: OptimizerT, module: nn.Module) -> OptimizerT:
    """Let an optimizer update a sharded module's shards; the same object comes back.

    Elementwise torch optimizers step over flat runs of the shards (kernels grow with units, not
    parameters); others see one `ShardedTensor` per parameter.

    Args:
        optimizer: made over the module's parameters, before or after `fully_shard_model`.
        module: what `fully_shard_model` returned, or a module of several such and no other
            parameters: the runner of a pipeline whose ranks hold several stages.

    Raises:
        TypeError: if the module is not sharded.
        ValueError: if the optimizer holds none of its parameters, or needs whole tensors and the
            module's are cut.
        DisagreementError: for another optimizer than other ranks have.

    Examples:
        >>> model = fully_shard_model(torch.nn.Linear(8, 1))
        >>> optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()), model)
    """
    # A runner of a pipeline holds several sharded stages, and one optimizer steps all of them.
    parts = _sharded_parts(module)
    groups = [group for part in parts for group in part.parameter_groups()]
    regions = regions_of(module)
    point_at_localised(optimizer, module)
    # Refusals first. Then the optimizer's groups hold main parameters instead of the user's.
    for group in groups:
        for ref, main in zip(group.refs, group.main_parameters, strict=True):
            if any(each.of(main) is not None for each in regions):
                refuse_looking_at_part(optimizer, ref.name, main, ref.parameter)
    borrowed = adopt_optimizer("fully_shard_optimizer", optimizer, groups, module, _KEEP_WHOLE)
    # Its step first ends what backwards have left open; scalers look for inf; then flat runs step.
    for part in parts:
        engine = part.sharding_engine
        borrowed.add([*part.parameter_groups()], engine.mark_weights_changed, engine.reducer)
    answer_scalers(optimizer, borrowed, dist.get_world_size())
    whole = any(map(gives_whole_tensors, parts))
    prepare_optimizer_state(optimizer, whole=whole, regions=regions)
    return optimizer


_KEEP_WHOLE = (
    "give the optimizer to fully_shard(model, optimizer), which keeps its tensors whole, or "
    "mark(parameter, block_rows=rows) before sharding"
)


def _sharded_parts(module: nn.Module) -> list[ShardedModule]:
    """The module, or the outermost sharded modules in it, which hold all its parameters."""
    if isinstance(module, ShardedModule):
        return [module]
    parts: list[ShardedModule] = []
    inside: set[nn.Module] = set()
    for each in module.modules():  # outer ones first
        if isinstance(each, ShardedModule) and each not in inside:
            parts.append(each)
            inside.update(each.modules())
    sharded = {id(parameter) for part in parts for parameter in part.parameters()}
    bare = [name for name, p in module.named_parameters() if id(p) not in sharded]
    if not parts or bare:
        missing = f" ({bare[0]} belongs to no sharded module in it)" if parts and bare else ""
        raise TypeError(
            f"{type(module).__name__} is not sharded{missing}: call fully_shard_model(module, ...) "
            "first, or fully_shard(module, optimizer, ...) for both"
        )
    return parts
