"""`fully_shard`: one line between a plain PyTorch loop and a sharded one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.buffers import Shard
from lamina.ddp import (
    FlatStep,
    Strategy,
    point_optimizer_at,
    resolve_reduction,
    resolve_strategy,
)
from lamina.fsdp.limits import BufferArguments
from lamina.fsdp.meshes import MeshArguments, resolve_meshes
from lamina.fsdp.module import ShardedModule, is_sharded
from lamina.fsdp.precision import MixedPrecisionPolicy
from lamina.fsdp.sharding import ShardingSettings, shard_model
from lamina.fsdp.state import (
    finish_before_steps,
    give_whole_tensors,
    gives_whole_tensors,
    prepare_optimizer_state,
)
from lamina.fsdp.tensor_parallel import point_at_localised
from lamina.mesh import ParallelLayout, ParallelMesh, require_overlap

__all__ = ["fully_shard", "fully_shard_model", "fully_shard_optimizer"]

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


@overload
def fully_shard(module: nn.Module, optimizer: None = None, **settings: Any) -> ShardedModule: ...
@overload
def fully_shard(
    module: nn.Module, optimizer: OptimizerT, **settings: Any
) -> tuple[ShardedModule, OptimizerT]: ...
def fully_shard(  # type: ignore[misc]
    module: nn.Module,
    optimizer: OptimizerT | None = None,
    *,
    device_mesh: ParallelMesh | DeviceMesh | None = None,
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
    dp_shard_dim: str | Sequence[str] | None = None,
    dp_outer_dim: str | Sequence[str] | None = None,
    tp_dim: str | None = None,
    expt_device_mesh: ParallelMesh | DeviceMesh | None = None,
    zero_dp_strategy: int | str = 3,
    outer_dp_sharding_strategy: int | str = 0,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
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
    init_module: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = True,
) -> ShardedModule | tuple[ShardedModule, OptimizerT]:
    """Shard a model (and its optimizer) over the data-parallel ranks, in place.

    The training loop stays plain PyTorch: `loss.backward(); optimizer.step();
    optimizer.zero_grad()`. Between steps, parameters and gradients are `ShardedTensor`s of global
    shape where the strategy shards them; `torch.nn.utils.clip_grad_norm_` gives the global norm.

    Args:
        module: the whole model; on the meta device it is materialised unit by unit.
        optimizer: any torch optimizer over the module's parameters. The object stays the same one:
            its groups and schedulers stay attached, its parameters are re-pointed.
        device_mesh: a `ParallelMesh` or a torch `DeviceMesh` with named dimensions; None builds
            one axis over the whole world.
        fsdp_unit_modules: classes, or import strings, of the modules that are gathered and
            released as units; None finds repeated blocks and large embeddings by themselves.
        dp_shard_dim: name (or names, taken as one axis) of the mesh dimension to shard along; by
            default `dp_shard_cp` of a ParallelMesh, or a DeviceMesh's only dimension.
        dp_outer_dim: name of the dimension of replicas (HSDP, HFSDP); by default `dp_replicate` of
            a ParallelMesh, else none.
        tp_dim: name of the tensor-parallel dimension: one that is left out when the sharding
            dimension is found by itself, and may not be a data-parallel one.
        expt_device_mesh: mesh of expert parameters, under the same dimension names (or
            `expert_dp`); by default a ParallelMesh's own.
        zero_dp_strategy: 0 "no_shard", 1 "optim", 2 "optim_grads", 3 "optim_grads_params".
        outer_dp_sharding_strategy: 0 "no_shard" (HSDP) or 1 "optim" (HFSDP).
        mixed_precision_policy: dtypes of the copies of weights and gradients.
        overlap_grad_reduce: reduce a unit's gradients while earlier units' backward runs.
        overlap_param_gather: gather the next unit's weights while one computes.
        sync_model_each_microbatch: every backward ends with summed gradients. If False, every
            backward is as inside `no_sync` until `model.finish_grad_sync()`, or the step of the
            optimizer that was given, ends the accumulation.
        init_model_with_meta_device: the model has to be on the meta device; False takes meta
            parameters where there are some.
        preproc_state_dict_for_dcp_ckpt: `state_dict()` of model and optimizer hold what
            `torch.distributed.checkpoint` saves and loads on any number of ranks; if False, whole
            plain tensors on every rank (collective), for `torch.save`.
        report_nan_in_param_grad: refuse gradients that are not finite before they are sent,
            naming parameter and rank (costs a pass over the gradients and a synchronisation).
        average_in_collective: average inside the collective. The ordered reduction does so either
            way, on the fp32 sum: both settings give the same bits.
        calculate_per_token_loss: sum gradients instead of averaging them over ranks
            (`lamina.ddp.finalize_grads` divides by the global token count).
        keep_fp8_transpose_cache: refused: weights are not kept in FP8.
        nccl_ub: refused where NCCL cannot register memory, with the reason.
        fsdp_double_buffer: gather into fixed memory that units which never live together share.
        hybrid_fsdp_group: a group over outer and sharding dimension; its ranks are checked, and
            nothing is sent over it, as sums and gathers go axis by axis.
        hybrid_fsdp_expt_group: the same for expert parameters.
        fsdp_group_ag: communicator for gathers, over the sharding dimension's ranks; by default
            one is made.
        expt_fsdp_group_ag: the same for expert parameters.
        device: where meta parameters go; by default the device of the other parameters, or the
            mesh's.
        disable_bucketing: a buffer, and so a collective, for every parameter.
        disable_symmetric_registration: with `nccl_ub`, user buffers without symmetric windows.
        enable_fine_grained_param_gather: gather module by module instead of unit by unit. Modules
            that read the weights of modules inside them need weights of their own (see
            docs/fsdp.md).
        use_decoupled_grad: refused: nothing reads `.decoupled_grad`.
        cuda_graph_mode: fixed addresses for CUDA graphs; needs CUDA and `fsdp_double_buffer`.
        maxpool_double_buffer: with `fsdp_double_buffer`, which always makes a slot as large as the
            largest unit in it.
        fsdp_db_use_persist_buf_on_alloc_fail: with `fsdp_double_buffer`, which always gives a unit
            that can share with none fixed memory of its own.
        reduction: "ordered" (one order of summation on any transport) or "native" (the backend's).
        reproducible: the same bits for every strategy and number of ranks.
        init_module: initialises one meta module's own tensors; None calls `reset_parameters()`.
        sync_module_states: start from the first data-parallel rank's values.

    Returns:
        `module`, whose class now also is a `ShardedModule`; with an optimizer, both.

    Raises:
        ValueError: for unknown strategies, units or mesh dimensions, and arguments that exclude
            or need each other.
        UnavailableError: for what this machine lacks.
        RuntimeError: if the module, or part of it, is sharded already.
    """
    _refuse_sharded(module)
    _check_meta(module, init_model_with_meta_device)
    mesh = ParallelLayout().build(_world_device()) if device_mesh is None else device_mesh
    if overlap_grad_reduce or overlap_param_gather:
        require_overlap("fully_shard(overlap_grad_reduce=, overlap_param_gather=)")
    dense, expert = resolve_meshes(
        MeshArguments(
            mesh,
            dp_shard_dim,
            dp_outer_dim,
            tp_dim,
            expt_device_mesh,
            hybrid_fsdp_group,
            hybrid_fsdp_expt_group,
            fsdp_group_ag,
            expt_fsdp_group_ag,
        )
    )
    strategy = resolve_strategy(zero_dp_strategy, outer_dp_sharding_strategy)
    _check_codec(mixed_precision_policy, strategy)
    place = _device_of(module, mesh, device)
    BufferArguments(
        average_in_collective,
        calculate_per_token_loss,
        keep_fp8_transpose_cache,
        nccl_ub,
        fsdp_double_buffer,
        disable_symmetric_registration,
        use_decoupled_grad,
        cuda_graph_mode,
        maxpool_double_buffer,
        fsdp_db_use_persist_buf_on_alloc_fail,
    ).check(dense, place)
    sharded = shard_model(
        module,
        ShardingSettings(
            strategy=strategy,
            dense=dense,
            expert=expert,
            precision=mixed_precision_policy or MixedPrecisionPolicy(),
            unit_classes=fsdp_unit_modules,
            overlap_reduce=overlap_grad_reduce,
            overlap_gather=overlap_param_gather,
            average=not calculate_per_token_loss,
            check_finite=report_nan_in_param_grad,
            broadcast=sync_module_states,
            slots=fsdp_double_buffer,
            fine_grained=enable_fine_grained_param_gather,
            bucket_per_parameter=disable_bucketing,
            reduction=resolve_reduction(reduction, reproducible),
            device=place,
            init_module=init_module,
        ),
    )
    sharded.set_model_auto_sync(sync_model_each_microbatch)
    if not preproc_state_dict_for_dcp_ckpt:
        give_whole_tensors(sharded)
    return sharded if optimizer is None else (sharded, fully_shard_optimizer(optimizer, sharded))


def fully_shard_model(module: nn.Module, **settings: Any) -> ShardedModule:
    """Shard a model's parameters and gradients, in place; settings as of `fully_shard`."""
    return fully_shard(module, None, **settings)


def fully_shard_optimizer(optimizer: OptimizerT, module: nn.Module) -> OptimizerT:
    """Let an optimizer update a sharded module's shards; the same object comes back.

    Elementwise torch optimizers step over flat runs of the shards (kernels grow with units, not
    parameters); others see one `ShardedTensor` per parameter.

    Args:
        optimizer: made over the module's parameters, before or after `fully_shard_model`.
        module: what `fully_shard_model` returned.

    Raises:
        TypeError: if the module is not sharded.
        ValueError: if the optimizer holds none of its parameters.
    """
    if not isinstance(module, ShardedModule):
        raise TypeError(
            f"{type(module).__name__} is not sharded: call fully_shard_model(module, ...) first, "
            "or fully_shard(module, optimizer, ...) for both"
        )
    groups = list(module.parameter_groups())
    point_at_localised(optimizer, module)
    point_optimizer_at(optimizer, groups)
    finish_before_steps(optimizer, module.sharding_engine)
    FlatStep(optimizer, groups, module.sharding_engine.mark_weights_changed)
    module.sharding_engine.follows_optimizer = True
    prepare_optimizer_state(optimizer, whole=gives_whole_tensors(module))
    return optimizer


def _refuse_sharded(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if is_sharded(child):
            raise RuntimeError(
                f"{name or type(module).__name__} is sharded already: call fully_shard once, on "
                "the whole model"
            )


def _check_codec(policy: MixedPrecisionPolicy | None, strategy: Strategy) -> None:
    sharded = any(isinstance(one, Shard) for one in strategy.placements.model_weights)
    if policy is not None and policy.weight_codec is not None and not sharded:
        raise ValueError(
            "weight_codec encodes weights that are gathered, and this strategy keeps them whole: "
            "use zero_dp_strategy=3"
        )


def _check_meta(module: nn.Module, expected: bool) -> None:
    parameters = list(module.parameters())
    if expected and parameters and not any(parameter.is_meta for parameter in parameters):
        raise ValueError(
            f"init_model_with_meta_device=True, and none of the {len(parameters)} parameters of "
            f"{type(module).__name__} is on the meta device: build it under "
            'torch.device("meta"), or leave the argument out'
        )


def _device_of(
    module: nn.Module, mesh: ParallelMesh | DeviceMesh, device: torch.device | str | None
) -> torch.device:
    if device is not None:
        return torch.device(device)
    for parameter in module.parameters():
        if not parameter.is_meta:
            return parameter.device
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _world_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
