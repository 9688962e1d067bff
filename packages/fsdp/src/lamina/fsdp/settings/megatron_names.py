"""Arguments that `fully_shard` has because Megatron-FSDP has them: they are checked, and no more.

Each names something that Lamina does in any case. A value that cannot be meant is refused; the
others change nothing, so nothing behind `fully_shard` sees them.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lamina.ddp.engine import DataParallelAxes
from lamina.fsdp.settings.sharding_settings import ShardingSettings

__all__ = ["MegatronNames"]


@dataclass(frozen=True, kw_only=True)
class MegatronNames:
    """The arguments' values, each about what is done anyway.

    Meta parameters are materialised wherever there are some, and sums and gathers go axis by axis
    rather than over a hybrid group. A slot is as large as the largest unit in it, and a unit that
    can share with none gets fixed memory of its own.
    """

    init_model_with_meta_device: bool = False
    hybrid_fsdp_group: ProcessGroup | None = None
    hybrid_fsdp_expt_group: ProcessGroup | None = None
    maxpool_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False

    def check(
        self,
        module: nn.Module,
        settings: ShardingSettings,
        dense: DataParallelAxes,
        expert: DataParallelAxes | None,
    ) -> None:
        """Raise ValueError for a value that cannot be meant, before the module is sharded."""
        parameters = list(module.parameters())
        on_meta = not parameters or any(parameter.is_meta for parameter in parameters)
        if self.init_model_with_meta_device and not on_meta:
            raise ValueError(
                f"init_model_with_meta_device=True, and none of the {len(parameters)} parameters "
                f"of {type(module).__name__} is on the meta device: build it under "
                'torch.device("meta"), or leave the argument out'
            )
        for name in ("maxpool_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail"):
            if getattr(self, name) and not settings.fsdp_double_buffer:
                raise ValueError(
                    f"{name}=True is about the fixed buffers of fsdp_double_buffer=True, which is "
                    "off: turn it on, or leave this one out"
                )
        _check_hybrid("hybrid_fsdp_group", self.hybrid_fsdp_group, dense)
        _check_hybrid("hybrid_fsdp_expt_group", self.hybrid_fsdp_expt_group, expert)


def _check_hybrid(argument: str, group: ProcessGroup | None, axes: DataParallelAxes | None) -> None:
    """A group over both axes has to agree with them."""
    if group is None:
        return
    if axes is None:
        raise ValueError(
            f"{argument} is given, and the mesh has no expert axes: pass expt_device_mesh"
        )
    members = tuple(dist.get_process_group_ranks(group))
    mine = {*axes.outer.ranks, *axes.inner.ranks}
    if len(members) != axes.size or not mine <= set(members):
        raise ValueError(
            f"{argument} has ranks {members}, and the mesh says {axes.size} ranks with at least "
            f"{sorted(mine)} among them ({axes.describe()}): flatten dp_outer_dim and dp_shard_dim "
            "of the same mesh"
        )
