"""`fully_shard`: one line between a plain PyTorch loop and a sharded one."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy
from torch.optim import Optimizer

from lamina.collectives.engine import MESSAGE_BYTES
from lamina.ddp.engine import (
    BufferPolicy,
    ScratchBuffers,
    adopt_main_parameters,
    answer_scalers,
    collect_parameters,
    refuse_cut_tensors,
    refuse_optimizer,
    refuse_wrapped,
    require_same_model,
    require_same_optimizer,
    show_decoupled,
    step_over_groups,
    warn_of_unfinished_steps,
)
from lamina.fsdp.api.build import (
    build_units,
    start_engine,
    storage_pool,
    updated_apart,
    without_values,
)
from lamina.fsdp.api.resolve import Sharding, resolve
from lamina.fsdp.execution.hooks import attach_hooks, finish_before_steps
from lamina.fsdp.module.sharded_module import (
    ShardedModule,
    WatchedModule,
    adopt,
    remember_sharding,
)
from lamina.fsdp.settings.hardware_limits import UnavailableError
from lamina.fsdp.settings.megatron_names import MegatronNames
from lamina.fsdp.settings.precision import MixedPrecisionPolicy
from lamina.fsdp.settings.sharding_settings import ShardingSettings, StrategyChoice
from lamina.fsdp.state.cut_regions import (
    TensorRegions,
    parts_among,
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

__all__ = ["fully_shard", "fully_shard_model", "fully_shard_optimizer"]

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


def _typed(
    function: Callable[Concatenate[nn.Module, Optimizer | None, _P], object],
) -> _FullyShard[_P]:
    return cast("_FullyShard[_P]", function)


def _with_settings_of(
    _: _FullyShard[_P],
) -> Callable[[Callable[..., ShardedModule]], _FullyShardModel[_P]]:
    return lambda function: function


@_typed
@translates(_FOREIGN)
def fully_shard(
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    device_mesh: ParallelMesh | DeviceMesh | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    dp_shard_dim: str | Sequence[str] | None = None,
    dp_outer_dim: str | Sequence[str] | None = None,
    tp_dim: str | None = None,
    expt_device_mesh: ParallelMesh | DeviceMesh | None = None,
    zero_dp_strategy: StrategyChoice | Mapping[str, StrategyChoice] = 3,
    outer_dp_sharding_strategy: int | str = 0,
    mixed_precision_policy: MixedPrecisionPolicy | TorchPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    sync_model_each_microbatch: bool = True,
    init_model_with_meta_device: bool = False,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    report_nan_in_param_grad: bool = False,
    average_in_collective: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    hybrid_fsdp_group: ProcessGroup | None = None,
    hybrid_fsdp_expt_group: ProcessGroup | None = None,
    fsdp_group_ag: ProcessGroup | None = None,
    expt_fsdp_group_ag: ProcessGroup | None = None,
    device: torch.device | str | None = None,
    disable_bucketing: bool = False,
    disable_symmetric_registration: bool = False,
    enable_fine_grained_param_gather: bool = False,
    use_decoupled_grad: bool = False,
    cuda_graph_mode: bool = False,
    maxpool_double_buffer: bool = False,
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
    reduction: str = "ordered",
    reproducible: bool = False,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | None = None,
    check_order: bool = False,
    check_storage: bool = False,
    init_module: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = True,
    broadcast_buffers: BufferPolicy = "start",
    gather_budget: int | None = None,
    reduce_budget: int | None = None,
    reduce_message_bytes: int = MESSAGE_BYTES,
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
        device_mesh: a `ParallelMesh` or a torch `DeviceMesh` with named dimensions; None builds
            one axis over the whole world, of GPUs if it runs NCCL and there are some.
        fsdp_unit_modules: classes, or import strings, of the modules that are gathered and
            released as units; None finds repeated blocks and large embeddings by themselves.
        dp_shard_dim: name (or names, taken as one axis) of the mesh dimension to shard along; by
            default `dp_shard_cp` of a ParallelMesh, or a DeviceMesh's only dimension. Dimensions of
            a DeviceMesh that are neither data-parallel nor `tp_dim`, `tp` or `pp` are refused.
        dp_outer_dim: name of the dimension of replicas (HSDP, HFSDP); by default `dp_replicate` of
            a ParallelMesh, else none.
        tp_dim: name of the tensor-parallel dimension: one that is left out when the sharding
            dimension is found by itself, and may not be a data-parallel one.
        expt_device_mesh: mesh of expert parameters, under the same dimension names (or
            `expert_dp`); by default a ParallelMesh's own. Experts are not sharded along its
            dimensions `ep` and `expert_tp`, so that it may be the `device_mesh`.
        zero_dp_strategy: 0 "no_shard", 1 "optim", 2 "optim_grads", 3 "optim_grads_params", or a
            `Strategy` (which speaks for the outer dimension as well). Or one for each pattern
            (`fnmatch`) of parameter names, of which the first that matches counts, such as
            `{"*lora*": 3, "*": 0}`: frozen weights that stay whole are never gathered.
        outer_dp_sharding_strategy: 0 "no_shard" (HSDP) or 1 "optim" (HFSDP), which needs an outer
            dimension.
        mixed_precision_policy: dtypes of the copies of weights and gradients, as Lamina's policy or
            torch's (whose parameters keep their own dtype as main weights).
        overlap_grad_reduce: reduce a unit's gradients while earlier units' backward runs.
        overlap_param_gather: gather the next unit's weights while one computes.
        sync_model_each_microbatch: every backward ends with summed gradients. If False, every
            backward is as inside `no_sync` until `model.finish_grad_sync()`, or the step of the
            optimizer that was given, ends the accumulation.
        init_model_with_meta_device: the model has to be on the meta device; False takes meta
            parameters where there are some.
        preproc_state_dict_for_dcp_ckpt: `state_dict()` of model and optimizer hold what
            `torch.distributed.checkpoint` saves and loads on any number of ranks; if False, whole
            plain tensors on every rank (collective), for `torch.save`; refused where tp or ep has
            cut parameters.
        report_nan_in_param_grad: refuse a step if a rank's own gradient is not finite, on all ranks
            that sum with it, naming parameter and rank (costs a pass over the gradients, and a wait
            for the device once per step).
        average_in_collective: average inside the collective. The ordered reduction does so either
            way, on the fp32 sum: both settings give the same bits. With `reduction="native"` the
            backend averages, in the wire dtype.
        calculate_per_token_loss: sum gradients instead of averaging them over ranks
            (`lamina.ddp.finalize_grads` divides by the global token count).
        keep_fp8_transpose_cache: modules that multiply in FP8 keep the codes of their transposed
            weights from forward until backward, one byte per element, instead of quantising the
            gathered weights again. Refused where no module has that attribute.
        nccl_ub: gather into memory that NCCL has registered; needs `fsdp_double_buffer`, and is
            refused where NCCL cannot register memory, with the reason. Call
            `model.deregister_memory()` on all ranks before the process group is destroyed.
        fsdp_double_buffer: gather into fixed memory that units which never live together share.
        hybrid_fsdp_group: a group over outer and sharding dimension; its ranks are checked, and
            nothing is sent over it, as sums and gathers go axis by axis.
        hybrid_fsdp_expt_group: the same for expert parameters.
        fsdp_group_ag: communicator for gathers, over the sharding dimension's ranks; by default
            one is made.
        expt_fsdp_group_ag: the same for expert parameters.
        device: where the model computes: parameters and buffers are moved there, and inputs have to
            be there (`Runtime.device`); by default the mesh's. Under a mesh of CPUs a model stays
            on the accelerator it is on.
        disable_bucketing: a buffer, and so a collective, for every parameter.
        disable_symmetric_registration: with `nccl_ub`, user buffers without symmetric windows.
        enable_fine_grained_param_gather: gather module by module instead of unit by unit. Modules
            that read the weights of modules inside them need weights of their own (see
            docs/fsdp.md).
        use_decoupled_grad: parameters have their gradient as `.decoupled_grad` too, for optimizers
            that read it there. It is another name of `.grad`, whose dtype may differ from the
            parameter's (`MixedPrecisionPolicy(main_grads_dtype=)`).
        cuda_graph_mode: after the first step no unit's weights ever move, so that graphs of
            blocks (`torch.cuda.make_graphed_callables`) stay right; a unit whose place is taken is
            gathered later instead. Needs CUDA and `fsdp_double_buffer`.
        maxpool_double_buffer: with `fsdp_double_buffer`, which always makes a slot as large as the
            largest unit in it.
        fsdp_db_use_persist_buf_on_alloc_fail: with `fsdp_double_buffer`, which always gives a unit
            that can share with none fixed memory of its own.
        reduction: "ordered" (one order of summation on any transport), "native" (the backend's),
            "int8" (ordered, over a wire of int8 blocks with error feedback), or "checked" (ordered,
            over a wire with checksums, on CPUs: `DamagedMessageError` names the sender).
        reproducible: the same bits for every strategy and number of ranks.
        offload_policy: torch FSDP2's `CPUOffloadPolicy()`: weights, main grads and optimizer state
            lie in host memory, and the optimizer steps there; needs `zero_dp_strategy=3`. The
            model may be built on the host: it computes on `device`, by default the mesh's.
        reshard_after_forward: with `zero_dp_strategy=3`, give whole weights back after forward
            (True), or keep them for backward (False). None gives back all but the root's. The unit
            whose backward comes first keeps them either way. For one unit:
            `model.unit_of(block).set_reshard_after_forward(...)`.
        check_order: with `zero_dp_strategy=3`, tell other ranks before each gather which unit it
            is: a unit that runs on some ranks only is named (`RankOrderError`) instead of hanging
            the others, and so is an evaluation that only rank 0 runs. For debugging: a small
            collective and a synchronisation each time.
        check_storage: with `zero_dp_strategy=3`, name the unit whose whole weights are read while
            they are released (`StaleStorageError`), as by a reference to a parameter that was kept
            from an earlier gather, instead of crashing. Released storage is kept and holds NaN.
            For debugging: each operator of a forward is looked at, and no memory is given back.
        init_module: initialises one meta module's own tensors; None calls `reset_parameters()`.
        sync_module_states: start from the first data-parallel rank's values.
        broadcast_buffers: when the first data-parallel rank's buffers (running statistics, tables)
            are sent to the others: "start" once, with `sync_module_states`; "forward" also before
            each forward of training and the first one after it, as torch's DDP does; "never".
        gather_budget: bytes of whole weights per rank that may be live at once: as many units as
            fit are gathered ahead. None gathers one ahead. Needs `zero_dp_strategy=3`.
        reduce_budget: bytes of gradients per rank that may be on the wire at once. None allows two
            reductions, and one beside a unit whose gradients are coming.
        reduce_message_bytes: of a message in which an ordered reduce-scatter brings a slice of a
            unit over NCCL. Three of them take the place of as many bytes as the unit's gradients
            have, where that is more. By default 32 MiB.

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
    settings = ShardingSettings(
        device_mesh=device_mesh,
        fsdp_unit_modules=fsdp_unit_modules,
        dp_shard_dim=dp_shard_dim,
        dp_outer_dim=dp_outer_dim,
        tp_dim=tp_dim,
        expt_device_mesh=expt_device_mesh,
        zero_dp_strategy=zero_dp_strategy,
        outer_dp_sharding_strategy=outer_dp_sharding_strategy,
        mixed_precision_policy=mixed_precision_policy,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        sync_model_each_microbatch=sync_model_each_microbatch,
        preproc_state_dict_for_dcp_ckpt=preproc_state_dict_for_dcp_ckpt,
        report_nan_in_param_grad=report_nan_in_param_grad,
        average_in_collective=average_in_collective,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
        fsdp_group_ag=fsdp_group_ag,
        expt_fsdp_group_ag=expt_fsdp_group_ag,
        device=device,
        disable_bucketing=disable_bucketing,
        disable_symmetric_registration=disable_symmetric_registration,
        enable_fine_grained_param_gather=enable_fine_grained_param_gather,
        use_decoupled_grad=use_decoupled_grad,
        cuda_graph_mode=cuda_graph_mode,
        reduction=reduction,
        reproducible=reproducible,
        offload_policy=offload_policy,
        reshard_after_forward=reshard_after_forward,
        check_order=check_order,
        check_storage=check_storage,
        init_module=init_module,
        sync_module_states=sync_module_states,
        broadcast_buffers=broadcast_buffers,
        gather_budget=gather_budget,
        reduce_budget=reduce_budget,
        reduce_message_bytes=reduce_message_bytes,
    )
    names = MegatronNames(
        init_model_with_meta_device=init_model_with_meta_device,
        hybrid_fsdp_group=hybrid_fsdp_group,
        hybrid_fsdp_expt_group=hybrid_fsdp_expt_group,
        maxpool_double_buffer=maxpool_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail=fsdp_db_use_persist_buf_on_alloc_fail,
    )
    sharded = _shard(module, optimizer, settings, names)
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
    names: MegatronNames,
) -> ShardedModule:
    """Shard a model; `optimizer` is looked at, and not changed yet."""
    _check_kinds(module, optimizer)
    refuse_wrapped("fully_shard", module)
    if settings.overlap_grad_reduce or settings.overlap_param_gather:
        require_overlap("fully_shard(overlap_grad_reduce=, overlap_param_gather=)")
    if optimizer is not None:  # an earlier call may have been refused half-way
        point_at_localised(optimizer, module)
    check_patterns(module, settings)
    sharding = resolve(module, settings, optimizer)
    refs = collect_parameters(module)
    require_same_model("fully_shard", refs, sharding.dense, sharding.expert, settings, optimizer)
    names.check(module, settings, sharding.dense, sharding.expert)
    transposing = _with_transposes(module) if settings.keep_fp8_transpose_cache else []
    if optimizer is not None:
        known = {id(ref.parameter) for ref in refs}
        refuse_optimizer(optimizer, known, updated_apart(refs, sharding))
        for ref in parts_among(refs, sharding.model):
            refuse_looking_at_part(optimizer, ref.name, ref.parameter)
    if not settings.preproc_state_dict_for_dcp_ckpt:
        refuse_parts(module, sharding.model)
    sharded = _build(module, sharding)
    for child in transposing:
        setattr(child, _TRANSPOSES, True)
    sharded.set_model_auto_sync(settings.sync_model_each_microbatch)
    if settings.reshard_after_forward is not None:
        sharded.set_reshard_after_forward(settings.reshard_after_forward)
    groups = list(sharded.parameter_groups())
    if settings.use_decoupled_grad:
        show_decoupled(main for group in groups for main in group.main_parameters)
    if settings.preproc_state_dict_for_dcp_ckpt:
        show_parts(sharded, TensorRegions(groups, sharding.model))
        give_whole_tensors(sharded, always=False)
    else:
        give_whole_tensors(sharded)
    blank = without_values(settings)
    remember_sharding([sharded], lambda copies: _shard(copies[0], None, blank, names))
    return sharded


def _build(module: nn.Module, sharding: Sharding) -> ShardedModule:
    """Cut a model into units and put an engine on their hooks."""
    settings, policy = sharding.settings, sharding.settings.precision
    localise_dtensors(module)
    plans = plan_units(module, settings.fsdp_unit_modules)
    refuse_uninitialised(module, settings.init_module)
    if settings.enable_fine_grained_param_gather:
        plans = refine(module, plans)
    scratch, pool = ScratchBuffers(), storage_pool(sharding)
    units = build_units(module, plans, sharding, scratch, pool)
    hooks = []
    for plan, unit in zip(plans, units, strict=True):
        root = plan.module is module
        hooks += attach_hooks(
            [plan.module],
            unit,
            input_dtype=policy.param_dtype if policy.cast_forward_inputs else None,
            output_dtype=policy.output_dtype if root else None,
            inner=not root,
        )
    start_engine(hooks, sharding, scratch, pool)
    return adopt(module, WatchedModule if settings.check_storage else ShardedModule)


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
    name = _TRANSPOSES
    found = [child for child in module.modules() if hasattr(child, name)]
    if not found:
        raise UnavailableError(
            f"{name}=True: no module of {type(module).__name__} multiplies in FP8 (none has an "
            f"attribute {name}), so there is no transpose to keep: use layers that do, such as "
            "lamina.models with Precision(backend='torch-fp8'), or leave it False"
        )
    return found


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
    parts = _sharded_parts(module)
    groups = [group for part in parts for group in part.parameter_groups()]
    regions = regions_of(module)
    point_at_localised(optimizer, module)
    require_same_optimizer("fully_shard_optimizer", optimizer, groups)
    for ref, main in (one for g in groups for one in zip(g.refs, g.main_parameters, strict=True)):
        if any(one.of(main) is not None for one in regions):
            refuse_looking_at_part(optimizer, ref.name, main, ref.parameter)
    refuse_cut_tensors(optimizer, groups, _KEEP_WHOLE)
    adopt_main_parameters(optimizer, groups)
    warn_of_unfinished_steps(optimizer, module)
    for part in parts:
        engine = part.sharding_engine
        finish_before_steps(optimizer, engine)
        answer_scalers(optimizer, part.parameter_groups(), dist.get_world_size(), engine.reducer)
        step_over_groups(optimizer, part.parameter_groups(), engine.mark_weights_changed)
        engine.follow(optimizer)
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
    found: list[ShardedModule] = []
    inside: set[nn.Module] = set()
    for each in module.modules():  # outer ones first
        if isinstance(each, ShardedModule) and each not in inside:
            found.append(each)
            inside.update(each.modules())
    held = {id(parameter) for part in found for parameter in part.parameters()}
    bare = [name for name, p in module.named_parameters() if id(p) not in held]
    if not found or bare:
        missing = f" ({bare[0]} belongs to no sharded module in it)" if found and bare else ""
        raise TypeError(
            f"{type(module).__name__} is not sharded{missing}: call fully_shard_model(module, ...) "
            "first, or fully_shard(module, optimizer, ...) for both"
        )
    return found
