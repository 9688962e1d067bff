"""What other wrappers build on, beside the engine and its units in `lamina.ddp.engine`."""

from lamina.fsdp.api.shard_module import ModuleWithUnit

__all__ = ["ModuleWithUnit"]
