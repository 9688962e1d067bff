"""Lamina under the names that torch's tests use."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import peer_device
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.testing._internal.distributed.common_state_dict import (
    VerifyStateDictMixin as TorchVerifyStateDictMixin,
)
from torch.utils._pytree import tree_map

from lamina.buffers import ShardedTensor
from lamina.ddp import DistributedDataParallel as Wrapper
from lamina.ddp import DistributedDataParallelConfig
from lamina.fsdp import ShardedModule, register_forward_method, shard_module

FSDPModule = ShardedModule
UnshardHandle = object
register_fsdp_forward_method = register_forward_method


class _EitherTensor(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, (ShardedTensor, TorchDTensor))

    def __getattr__(cls, name: str) -> Any:
        return getattr(TorchDTensor, name)


class DTensor(metaclass=_EitherTensor):
    """What a parameter of a sharded module is: `ShardedTensor`, or torch's under tp."""


def says_so() -> None:
    """Leave a file named after the running test: it wraps a model in what Lamina has."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[2].rpartition(" ")[0]
    if test:
        (Path(os.environ["LAMINA_PEER_WRAPPED"]) / test).touch()


def fully_shard(module: Any, *, mesh: Any = None, **options: Any) -> Any:
    """Shard one module with torch FSDP2's arguments."""
    says_so()
    return shard_module(module, mesh, **options)


def whole(tensor: Any) -> Any:
    """Return all of a tensor; one data-parallel rank has plain parameters."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_sharded_parity(
    case: Any,
    replicated: torch.nn.Module,
    sharded: torch.nn.Module,
    prefixes_to_ignore: Any = (),
) -> None:
    """Compare whole values and gradients, where torch compares the parts that `Shard(0)` cuts."""
    found = {}
    for name, part in sharded.named_parameters():
        for prefix in prefixes_to_ignore:
            name = name.replace(prefix, "")
        found[name] = (whole(part.detach()), whole(part.grad))
    expected = {name: (each.data, each.grad) for name, each in replicated.named_parameters()}
    torch.testing.assert_close(found, expected)


class VerifyStateDictMixin(TorchVerifyStateDictMixin):
    """Compares whole tensors, which torch's makes of the classes that torch has."""

    def _compare_tensor(self, orig_tensor: Any, dist_tensor: Any, *rest: Any, **named: Any) -> None:
        super()._compare_tensor(orig_tensor, whole(dist_tensor), *rest, **named)

    def _verify_osd_by_load(self, model: Any, optim: Any, new_optim: Any, dist_osd: Any) -> None:
        super()._verify_osd_by_load(model, optim, new_optim, tree_map(whole, dist_osd))


class DistributedDataParallel(Wrapper):
    """Lamina's DDP with torch's arguments. Those that Lamina does not have are an error."""

    def __init__(self, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        says_so()
        for name in ("device_ids", "output_device", "broadcast_buffers", "bucket_cap_mb"):
            options.pop(name, None)
        for name in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view"):
            options.pop(name, None)  # what they ask for is always so
        if options:
            raise AttributeError(f"DistributedDataParallel has no argument {sorted(options)}")
        world = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        super().__init__(module, DistributedDataParallelConfig(), mesh)


__all__ = [
    "DTensor",
    "DistributedDataParallel",
    "FSDPModule",
    "VerifyStateDictMixin",
    "check_sharded_parity",
    "fully_shard",
    "peer_device",
]
