"""What the bridges share: models sharded over all ranks, and their state, sharded or whole."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.buffers import ShardedTensor
from lamina.ddp.engine import register_forward_method
from lamina.fsdp.api.fully_shard import fully_shard_model, fully_shard_optimizer
from lamina.fsdp.module.sharded_module import ShardedModule
from lamina.mesh import ParallelMesh


def shard_over_all_ranks(model: nn.Module, sharding: Mapping[str, Any]) -> ShardedModule:
    """Shard a model for a trainer that gives every rank other rows of the data.

    A model that is sharded already comes back as it is. If it has a `generate`, that gathers the
    root's weights too. `sharding` are keyword arguments of `fully_shard`. ValueError refuses a mesh
    with axes along which ranks need the same rows.
    """
    if isinstance(model, ShardedModule):
        return model
    _refuse_shared_rows(sharding)
    sharded = fully_shard_model(model, **sharding)
    if callable(getattr(type(model), "generate", None)):
        register_forward_method(sharded, "generate")
    return sharded


def _refuse_shared_rows(sharding: Mapping[str, Any]) -> None:
    mesh = sharding.get("device_mesh")
    mesh = mesh.mesh if isinstance(mesh, ParallelMesh) else mesh
    if not isinstance(mesh, DeviceMesh):
        return
    for name, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=False):
        if size > 1 and name in ("pp", "cp", "tp", sharding.get("tp_dim")):
            raise ValueError(
                f"device_mesh has {name}={size}: its ranks need the same rows of the data, and "
                "this trainer gives every rank other rows. Use data-parallel axes only (dp_shard, "
                "dp_replicate), or a loop of your own (examples/pretrain)"
            )


def attach_optimizer(optimizer: Optimizer, models: Iterable[nn.Module]) -> Optimizer:
    """Let an optimizer update the shards of the one of `models` whose parameters it holds.

    ValueError says that it holds parameters of none of them.
    """
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        if isinstance(model, ShardedModule):
            # The optimizer was made before or after its model was sharded.
            for group in model.parameter_groups():
                known = (*group.compute_parameters, *group.main_parameters)
                if not stepped.isdisjoint(map(id, known)):
                    return fully_shard_optimizer(optimizer, model)
    raise ValueError(
        f"{type(optimizer).__name__} holds no parameters of a sharded model: prepare the model "
        "first, or both in one call"
    )


def load_sharded(path: Path, stateful: Mapping[str, Any]) -> None:
    """Load what torch's DCP has saved in a folder on any number of ranks (collective).

    `stateful` are models and optimizers by the names that their state was saved under.
    """
    state = {name: each.state_dict() for name, each in stateful.items()}
    load(state, checkpoint_id=path)
    for name, each in stateful.items():
        each.load_state_dict(state[name])


@torch.no_grad()
def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Whole tensors of a model, sharded or not, in host memory, one by one (collective).

    Ranks that do not `keep` them take part, and get an empty dictionary.

    Note [Memory of one's own]
        Weights that a rank keeps whole are views of one flat buffer. Libraries that write
        safetensors ask which tensors share a storage, take these for tied weights, and save one of
        them. So each tensor gets memory of its own here, also where `.cpu()` would copy nothing. A
        tensor that the model holds under several names stays one tensor, as in one process.
    """
    state = model.state_dict(keep_vars=True)  # tied parameters are one object there
    copies: dict[int, Any] = {}
    for value in state.values():
        if id(value) not in copies:
            whole = value.full_tensor() if isinstance(value, ShardedTensor) else value
            if keep and isinstance(whole, torch.Tensor):  # not what get_extra_state() gives
                whole = whole.detach().to("cpu", copy=whole is value)
            copies[id(value)] = whole if keep else None
    return {name: copies[id(value)] for name, value in state.items()} if keep else {}


def with_memory_of_their_own(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with copies of the tensors that are parts of a larger storage; see the Note above."""
    plain = (torch.Tensor, nn.Parameter)  # a ShardedTensor has no storage that could be asked for
    return {
        name: value.clone()
        if type(value) in plain and value.untyped_storage().nbytes() != value.nbytes
        else value
        for name, value in state.items()
    }
