"""What other wrappers build on: the sharding engine and its units."""

from lamina.fsdp.api.shard_module import ModuleWithUnit
from lamina.fsdp.execution.engine import ShardingEngine
from lamina.fsdp.execution.unit import Unit

__all__ = ["ModuleWithUnit", "ShardingEngine", "Unit"]
