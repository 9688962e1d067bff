"""What sharding takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._compile import _disable_dynamo as one_graph_break
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "TorchDispatchMode",
    "current_graph_task_id",
    "forget_groups",
    "free_of_references",
    "local_shape_and_offset",
    "one_graph_break",
    "tree_leaves",
    "tree_map_only",
]


@contextmanager
def free_of_references(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let parameters of recurrent modules be swapped, which those refer to weakly."""
    recurrent = [module for module in modules if isinstance(module, nn.RNNBase)]
    for module in recurrent:
        module._flat_weight_refs.clear()
    yield
    for module in recurrent:
        module._init_flat_weights()


def forget_groups(module: nn.Module) -> None:
    """Make torch's FSDP2, which keeps the process groups of a module, let go of them."""
    for each in module.modules():
        state = each._get_fsdp_state() if isinstance(each, FSDPModule) else None
        several = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one
        for group in several or [getattr(state, "_fsdp_param_group", None)]:
            for which in ("mesh_info", "post_forward_mesh_info"):
                if (info := getattr(group, which, None)) is not None:
                    getattr(info.mesh, "_pg_registry", {}).clear()
                    for name, value in list(vars(info).items()):
                        if isinstance(value, ProcessGroup):
                            setattr(info, name, None)


def local_shape_and_offset(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shape of this rank's shard of a DTensor, and where the shard begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(shape, mesh, placements)
