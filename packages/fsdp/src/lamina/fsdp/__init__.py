"""One-line fully_shard for PyTorch: ZeRO 0-3, HSDP and HFSDP on one engine."""

from lamina.fsdp.api import fully_shard, fully_shard_model, fully_shard_optimizer
from lamina.fsdp.encoded import WeightCodec
from lamina.fsdp.engine import ShardingEngine
from lamina.fsdp.hooks import register_forward_method
from lamina.fsdp.keywords import FullyShardSettings
from lamina.fsdp.limits import UnavailableError
from lamina.fsdp.module import ShardedModule
from lamina.fsdp.order_check import RankOrderError
from lamina.fsdp.per_module import ModuleWithUnit, shard_module
from lamina.fsdp.precision import MixedPrecisionPolicy
from lamina.fsdp.torch_fsdp2 import (
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from lamina.fsdp.unit import Unit
from lamina.fsdp.units import UnitPlan, plan_units

__all__ = [
    "FullyShardSettings",
    "MixedPrecisionPolicy",
    "ModuleWithUnit",
    "RankOrderError",
    "ShardedModule",
    "ShardingEngine",
    "TorchFullyShardedDataParallel",
    "TorchFullyShardedDataParallelConfig",
    "UnavailableError",
    "Unit",
    "UnitPlan",
    "WeightCodec",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "plan_units",
    "register_forward_method",
    "shard_module",
]
