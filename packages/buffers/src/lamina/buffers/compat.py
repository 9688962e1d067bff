"""What a sharded tensor takes from torch that torch does not promise: its private names.

No other module of this layer uses one (tests/test_compat.py), so what a new torch breaks is here.
"""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

import torch
from torch._C import _current_graph_task_id as current_graph_task_id
from torch._C import _disabled_torch_function_impl as disabled_torch_function_impl
from torch._ops import OpOverload

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

__all__ = [
    "OpOverload",
    "current_graph_task_id",
    "disabled_torch_function_impl",
    "foreach_types",
    "is_traced",
    "make_wrapper_subclass",
    "refusals_of",
    "strided_shard",
]

make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass that has a shape and a dtype but no memory of its own."""


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


# -- storages that refuse to be read --------------------------------------------------------------
# Note [Storage that refuses access]
# torch's StorageImpl has a flag that makes each access to its memory raise, whatever tensor the
# access comes through: a parameter, its `.data`, a view, what autograd saved. Only builds with CUDA
# let Python set the flag, together with the message of the error. A build without CUDA has the flag
# as well. There it is set where it lies in the object: next to the flag that refuses writes, which
# Python can set in every build. `_find_refusals` finds the place by setting that one, and tries the
# result on a storage with memory. If torch has changed, nothing is found and nothing is refused.
# See docs/decisions/0414-released-storage-refuses-access.md.

_tell_why = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


def _find_refusals() -> tuple[int, ...]:
    """Where in a StorageImpl the flags are that refuse access: offsets in bytes; () if unknown."""
    probe, tried = torch.ones(2, device="cpu"), torch.ones(2, device="cpu")
    before = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    torch._C._set_throw_on_mutable_data_ptr(probe)
    after = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    changed = [(at, at + 1) for at in range(95) if before[at] != after[at]]
    if [before[one] + after[one] for one, _ in changed] != [1, 1]:
        return ()
    (any_check, _), (_, reads) = changed
    flags = [
        ctypes.c_bool.from_address(tried.untyped_storage()._cdata + at) for at in (any_check, reads)
    ]
    if before[reads]:
        return ()
    for flag in flags:
        flag.value = True
    try:
        tried.sum()
    except RuntimeError:
        return any_check, reads
    finally:
        for flag in flags:
            flag.value = False
    return ()


_REFUSALS = _find_refusals()


def refusals_of(storage: torch.UntypedStorage, why: str) -> tuple[ctypes.c_bool, ...]:
    """Return switches, all False: where all are True, any access to the memory is a RuntimeError.

    They refer to the storage's object, and must not be used once it is gone. Sizes, shapes and
    dtypes can be asked for at any time.

    Where torch lets Python say it (builds with CUDA), `why` is the message. There are none while
    torch's CUDA sanitizer runs: it asks every tensor that an operator names for its address, also
    where the operator makes a view and reads nothing.
    """
    sanitizer = getattr(sys.modules.get("torch.cuda._sanitizer"), "cuda_sanitizer", None)
    if sanitizer is not None and sanitizer.enabled:
        return ()
    if _REFUSALS and _tell_why is not None:
        _tell_why(storage._cdata, why)
    switches = tuple(ctypes.c_bool.from_address(storage._cdata + at) for at in _REFUSALS)
    for switch in switches:
        switch.value = False  # with a message torch refuses access at once
    return switches
