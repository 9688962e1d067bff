"""The keyword arguments of `fully_shard` and `shard_module` as types, to pass them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypedDict

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy

from lamina.ddp import Strategy
from lamina.fsdp.settings.precision import MixedPrecisionPolicy
from lamina.mesh import ParallelMesh

__all__ = ["FullyShardSettings", "ShardModuleSettings"]


class FullyShardSettings(TypedDict, total=False):
    """`fully_shard`'s keyword arguments; what each is about, and its default, is said there."""

    device_mesh: ParallelMesh | DeviceMesh | None
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None
    dp_shard_dim: str | Sequence[str] | None
    dp_outer_dim: str | Sequence[str] | None
    tp_dim: str | None
    expt_device_mesh: ParallelMesh | DeviceMesh | None
    zero_dp_strategy: int | str | Strategy
    outer_dp_sharding_strategy: int | str
    mixed_precision_policy: MixedPrecisionPolicy | TorchPolicy | None
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    sync_model_each_microbatch: bool
    init_model_with_meta_device: bool
    preproc_state_dict_for_dcp_ckpt: bool
    report_nan_in_param_grad: bool
    average_in_collective: bool
    calculate_per_token_loss: bool
    keep_fp8_transpose_cache: bool
    nccl_ub: bool
    fsdp_double_buffer: bool
    hybrid_fsdp_group: ProcessGroup | None
    hybrid_fsdp_expt_group: ProcessGroup | None
    fsdp_group_ag: ProcessGroup | None
    expt_fsdp_group_ag: ProcessGroup | None
    device: torch.device | str | None
    disable_bucketing: bool
    disable_symmetric_registration: bool
    enable_fine_grained_param_gather: bool
    use_decoupled_grad: bool
    cuda_graph_mode: bool
    maxpool_double_buffer: bool
    fsdp_db_use_persist_buf_on_alloc_fail: bool
    reduction: str
    reproducible: bool
    offload_policy: OffloadPolicy | None
    reshard_after_forward: bool | None
    check_order: bool
    init_module: Callable[[nn.Module], None] | None
    sync_module_states: bool
    gather_budget: int | None
    reduce_budget: int | None


class ShardModuleSettings(TypedDict, total=False):
    """As of `shard_module`, whose docstring says what each does."""

    reshard_after_forward: bool | int | None
    mp_policy: Any
    offload_policy: OffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    device: torch.device | str | None
