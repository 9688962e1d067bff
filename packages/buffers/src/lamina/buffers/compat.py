"""What a sharded tensor takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _disabled_torch_function_impl as disabled_torch_function_impl
from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "OpOverload",
    "allow_access",
    "current_graph_task_id",
    "disabled_torch_function_impl",
    "foreach_types",
    "is_traced",
    "make_wrapper_subclass",
    "refuse_access",
    "refuse_writes",
    "strided_shard",
]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape and a dtype but no memory of its own."""

# See Note [Storage that refuses access]. The first two are there from torch 2.14 on, and in builds
# of 2.13 with CUDA; a storage is given as its `_cdata`.
refuse_access: Callable[[int, str], None] | None = getattr(
    torch._C, "_set_storage_data_ptr_access_error_msg", None
)
allow_access: Callable[[int], None] | None = getattr(
    torch._C, "_clear_storage_data_ptr_access_error_msg", None
)
refuse_writes: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr


def foreach_types() -> list[list[type]]:
    """Return the lists of exact types that torch's optimizers and its clipping call foreach on."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    return [getattr(at, "_foreach_supported_types", []) for at in (optimizer, _foreach_utils)]


def is_traced() -> bool:
    """Whether `torch.compile` is tracing: it then describes inputs, their storage included."""
    return torch._guards.TracingContext.try_get() is not None


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a dimension that an axis to the right has cut before."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=split_factor)
