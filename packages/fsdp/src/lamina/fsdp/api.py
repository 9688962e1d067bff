"""`fully_shard`: one line between a plain PyTorch loop and a sharded one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.ddp import FlatStep, point_optimizer_at, resolve_strategy
from lamina.fsdp.module import ShardedModule, is_sharded
from lamina.fsdp.precision import MixedPrecisionPolicy
from lamina.fsdp.sharding import ShardingSettings, resolve_axes, shard_model
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
    zero_dp_strategy: int | str = 3,
    outer_dp_sharding_strategy: int | str = 0,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    init_module: Callable[[nn.Module], None] | None = None,
    report_nan_in_param_grad: bool = False,
    calculate_per_token_loss: bool = False,
    sync_module_states: bool = True,
    device: torch.device | str | None = None,
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
        zero_dp_strategy: 0 "no_shard", 1 "optim", 2 "optim_grads", 3 "optim_grads_params".
        outer_dp_sharding_strategy: 0 "no_shard" (HSDP) or 1 "optim" (HFSDP).
        mixed_precision_policy: dtypes of the copies of weights and gradients.
        overlap_grad_reduce: reduce a unit's gradients while earlier units' backward runs.
        overlap_param_gather: gather the next unit's weights while one computes.
        init_module: initialises one meta module's own tensors; None calls `reset_parameters()`.
        report_nan_in_param_grad: refuse gradients that are not finite before they are sent,
            naming parameter and rank (costs a pass over the gradients and a synchronisation).
        calculate_per_token_loss: sum gradients instead of averaging them over ranks
            (`lamina.ddp.finalize_grads` divides by the global token count).
        sync_module_states: start from the first data-parallel rank's values.
        device: where meta parameters go; by default the device of the other parameters, or the
            mesh's.

    Returns:
        `module`, whose class now also is a `ShardedModule`; with an optimizer, both.

    Raises:
        ValueError: for unknown strategies, units or mesh dimensions.
        RuntimeError: if the module, or part of it, is sharded already.
    """
    _refuse_sharded(module)
    mesh = ParallelLayout().build(_world_device()) if device_mesh is None else device_mesh
    if overlap_grad_reduce or overlap_param_gather:
        require_overlap("fully_shard(overlap_grad_reduce=, overlap_param_gather=)")
    dense, expert = resolve_axes(mesh, dp_shard_dim, dp_outer_dim)
    sharded = shard_model(
        module,
        ShardingSettings(
            strategy=resolve_strategy(zero_dp_strategy, outer_dp_sharding_strategy),
            dense=dense,
            expert=expert,
            precision=mixed_precision_policy or MixedPrecisionPolicy(),
            unit_classes=fsdp_unit_modules,
            overlap_reduce=overlap_grad_reduce,
            overlap_gather=overlap_param_gather,
            average=not calculate_per_token_loss,
            check_finite=report_nan_in_param_grad,
            broadcast=sync_module_states,
            device=_device_of(module, mesh, device),
            init_module=init_module,
        ),
    )
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
    FlatStep(optimizer, groups, module.sharding_engine.mark_weights_changed)
    module.sharding_engine.follows_optimizer = True
    return optimizer


def _refuse_sharded(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if is_sharded(child):
            raise RuntimeError(
                f"{name or type(module).__name__} is sharded already: call fully_shard once, on "
                "the whole model"
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
