"""Everything that `fully_shard` and `shard_module` can be told: each setting with its rules.

A rule that settings decide among themselves is checked here, when the settings are made. What
needs the module, the mesh or the machine is decided in `lamina.fsdp.api.resolve`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import OffloadPolicy

from lamina.collectives.engine import MESSAGE_BYTES
from lamina.ddp import Strategy
from lamina.ddp.engine import (
    BufferPolicy,
    Reduction,
    check_buffer_policy,
    resolve_reduction,
    resolve_strategy,
)
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, policy_from
from lamina.mesh import ParallelMesh

__all__ = ["ShardingSettings", "StrategyChoice"]

StrategyChoice = int | str | Strategy
"""A strategy's number or name, or the strategy itself."""


def _setting(default: Any, *, needs: tuple[str, str] | None = None, gathered: str = "") -> Any:
    """A field with rules, which are about other values than its default.

    `needs` is the setting that has to be on, and what of it this one is about. `gathered` is what
    of gathered weights it is about: a strategy that keeps weights whole refuses it.
    """
    return field(default=default, metadata={"needs": needs, "gathered": gathered})


@dataclass(frozen=True, kw_only=True)
class ShardingSettings:
    """What a user has chosen: the arguments of `fully_shard`, which explains each of them.

    ValueError refuses an unknown strategy or reduction, and settings that exclude or need others;
    TypeError a precision policy that is none.
    """

    device_mesh: ParallelMesh | DeviceMesh | None = None
    dp_shard_dim: str | Sequence[str] | None = None
    dp_outer_dim: str | Sequence[str] | None = None
    tp_dim: str | None = None
    expt_device_mesh: ParallelMesh | DeviceMesh | None = None
    fsdp_group_ag: ProcessGroup | None = None
    expt_fsdp_group_ag: ProcessGroup | None = None
    device: torch.device | str | None = None

    zero_dp_strategy: StrategyChoice | Mapping[str, StrategyChoice] = 3
    outer_dp_sharding_strategy: int | str = 0
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None
    enable_fine_grained_param_gather: bool = False
    disable_bucketing: bool = False

    mixed_precision_policy: MixedPrecisionPolicy | TorchPolicy | None = None
    offload_policy: OffloadPolicy | None = None
    reshard_after_forward: bool | None = _setting(None, gathered="weights that are gathered")
    fsdp_double_buffer: bool = _setting(False, gathered="the memory that units are gathered into")
    cuda_graph_mode: bool = _setting(
        False, needs=("fsdp_double_buffer", "the fixed buffers of fsdp_double_buffer=True")
    )
    nccl_ub: bool = False
    disable_symmetric_registration: bool = _setting(
        False, needs=("nccl_ub", "the memory that nccl_ub=True registers")
    )
    gather_budget: int | None = _setting(None, gathered="whole weights that come and go")
    overlap_param_gather: bool = True
    keep_fp8_transpose_cache: bool = False

    reduction: str = "ordered"
    reproducible: bool = False
    average_in_collective: bool = False
    calculate_per_token_loss: bool = False
    overlap_grad_reduce: bool = True
    reduce_budget: int | None = None
    reduce_message_bytes: int = MESSAGE_BYTES
    report_nan_in_param_grad: bool = False
    sync_model_each_microbatch: bool = True
    use_decoupled_grad: bool = False

    init_module: Callable[[nn.Module], None] | None = None
    sync_module_states: bool = True
    broadcast_buffers: BufferPolicy = "start"
    preproc_state_dict_for_dcp_ckpt: bool = True
    check_order: bool = _setting(False, gathered="gathers that need all ranks")
    check_storage: bool = _setting(False, gathered="whole weights that are released")

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.metadata and value is not one.default:
                self._check(one.name, value, one.metadata["needs"], one.metadata["gathered"])
        has_axis = self.dp_outer_dim is not None or isinstance(self.device_mesh, ParallelMesh)
        if not has_axis and any(
            strategy.placements.optimizer_state[0].cuts for strategy in self.strategies.values()
        ):
            what = f"outer_dp_sharding_strategy={self.outer_dp_sharding_strategy!r}"
            if resolve_strategy(0, self.outer_dp_sharding_strategy) == resolve_strategy(0):
                what = "the outer placement of zero_dp_strategy"
            raise ValueError(
                f"{what} is about the ranks along dp_outer_dim, which is not given: name the "
                "mesh's outer dimension, or cut nothing along it"
            )
        if not isinstance(self.reshard_after_forward, bool | None):
            raise ValueError(
                f"reshard_after_forward={self.reshard_after_forward!r}: True, False or None; for "
                "some units, model.unit_of(block).set_reshard_after_forward(...) after fully_shard"
            )
        if self.gather_budget is not None and self.fsdp_double_buffer:
            raise ValueError(
                f"gather_budget={self.gather_budget} is about whole weights that come and go, and "
                "fsdp_double_buffer=True gathers into fixed memory: leave one of them out"
            )
        if self.precision.weight_codec is not None and not self.gathers:
            raise ValueError(_kept_whole("weight_codec", "weights that are gathered"))
        _ = self.rank_sum
        check_buffer_policy(self.broadcast_buffers)

    def _check(self, name: str, value: Any, needs: tuple[str, str] | None, gathered: str) -> None:
        if needs is not None and not getattr(self, needs[0]):
            raise ValueError(
                f"{name}={value} is about {needs[1]}, which is off: turn it on, or leave this one "
                "out"
            )
        if gathered and not self.gathers:
            raise ValueError(_kept_whole(f"{name}={value}", gathered))

    @cached_property
    def strategies(self) -> dict[str, Strategy]:
        """Placements and cadence, by pattern of parameter names."""
        given = self.zero_dp_strategy
        patterns = given if isinstance(given, Mapping) else {"*": given}
        outer = self.outer_dp_sharding_strategy
        return {pattern: resolve_strategy(one, outer) for pattern, one in patterns.items()}

    def strategy_of(self, name: str) -> Strategy:
        """A parameter's strategy: that of the first pattern its name matches, or ValueError."""
        for pattern, strategy in self.strategies.items():
            if fnmatchcase(name, pattern):
                return strategy
        raise ValueError(
            f"zero_dp_strategy={{{', '.join(map(repr, self.strategies))}}} has no pattern that "
            f"{name} matches: add one, such as '*' for all that the patterns before it leave out"
        )

    @property
    def gathers(self) -> bool:
        """Whether weights are sharded, so that units are gathered."""
        return any(strategy.gathers for strategy in self.strategies.values())

    @cached_property
    def precision(self) -> MixedPrecisionPolicy:
        """The policy, as Lamina's."""
        given = self.mixed_precision_policy
        return policy_from(given, "mixed_precision_policy") or MixedPrecisionPolicy()

    @cached_property
    def rank_sum(self) -> Reduction:
        """How gradients are summed over ranks."""
        return resolve_reduction(
            self.reduction,
            self.reproducible,
            self.average_in_collective,
            per_token=self.calculate_per_token_loss,
            message_bytes=self.reduce_message_bytes,
        )


def _kept_whole(setting: str, about: str) -> str:
    return (
        f"{setting} is about {about}, and this strategy keeps weights whole: use "
        "zero_dp_strategy=3, or leave it out"
    )
