"""One-line `fully_shard` for PyTorch: ZeRO 0-3, HSDP and HFSDP on one engine."""

from lamina.ddp.engine import UnavailableError, register_forward_method
from lamina.fsdp.api.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from lamina.fsdp.api.shard_module import shard_module
from lamina.fsdp.api.torch_fsdp2 import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from lamina.fsdp.debugging.debug_modes import RankOrderError
from lamina.fsdp.module.sharded_module import ShardedModule
from lamina.fsdp.settings.precision import MixedPrecisionPolicy, WeightCodec
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.units.plan import UnitPlan, plan_units

__all__ = [
    "MixedPrecisionPolicy",
    "RankOrderError",
    "ShardedModule",
    "ShardingSettings",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "UnavailableError",
    "UnitPlan",
    "WeightCodec",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "plan_units",
    "register_forward_method",
    "shard_module",
]
