"""The one step that turns settings into what a model is sharded by, on its mesh and machine."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.ddp.engine import (
    DataParallelAxes,
    ModelAxes,
    collect_parameters,
    needs_whole_tensors,
    refuse_unplaced,
)
from lamina.fsdp.settings.hardware_limits import SlotMemory, slot_memory
from lamina.fsdp.settings.meshes import (
    Mesh,
    computing_device,
    model_axes,
    resolve_meshes,
)
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.state.cut_regions import beside_parts
from lamina.fsdp.weights.offloaded import Offload, resolve_offload
from lamina.mesh import ParallelLayout
from lamina.mesh.engine import named_mesh

__all__ = ["Sharding", "resolve"]


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Settings, and what they come to for one model.

    `dense` and `expert` are the data-parallel axes of parameters (`expert` is None where the mesh
    has none), and along `model` ranks hold different parts of the model. The model computes on
    `device`. `offload` keeps shards in host memory, and `slot_memory` allocates slots, unless they
    are None. `whole` are `id`s of parameters that no shard boundary may cut.
    """

    settings: ShardingSettings
    mesh: Mesh
    dense: DataParallelAxes
    expert: DataParallelAxes | None
    model: ModelAxes
    device: torch.device
    offload: Offload | None
    slot_memory: SlotMemory | None
    whole: Collection[int]


def resolve(
    module: nn.Module, settings: ShardingSettings, optimizer: Optimizer | None = None
) -> Sharding:
    """What settings come to for a module that is not sharded yet; `optimizer` will update it.

    ValueError names unknown mesh dimensions, and settings that this model or mesh excludes;
    UnavailableError what this machine lacks.
    """
    mesh = named_mesh(settings.device_mesh)
    if mesh is None:
        mesh = ParallelLayout().build()
    dense, expert = resolve_meshes(mesh, settings)
    refs, model = collect_parameters(module), model_axes(mesh, settings)
    on_meta = not refs or any(ref.parameter.is_meta for ref in refs)
    if settings.init_model_with_meta_device and not on_meta:
        raise ValueError(
            f"init_model_with_meta_device=True, and none of the {len(refs)} parameters of "
            f"{type(module).__name__} is on the meta device: build it under "
            'torch.device("meta"), or leave the argument out'
        )
    # A mesh that the user has made, and that names tp, says how many ranks it has: one, perhaps.
    if settings.device_mesh is None or model.tp is None:
        refuse_unplaced(refs, dense, model.tp)
    dense = beside_parts(dense, refs, model)
    expert = None if expert is None else beside_parts(expert, refs, model)
    device, offload = _device_and_offload(module, mesh, settings, dense)
    if offload is not None and settings.precision.weight_codec is not None:
        raise ValueError(
            "weight_codec keeps codes on the device beside main weights, and offload_policy keeps "
            "shards on the host: use one of the two"
        )
    axes = [dense] if expert is None else [dense, expert]
    gathering = [one.inner.sibling("gather") for one in axes]
    return Sharding(
        settings=settings,
        mesh=mesh,
        dense=dense,
        expert=expert,
        model=model,
        device=device,
        offload=offload,
        slot_memory=slot_memory(settings, gathering, device),
        whole=needs_whole_tensors(optimizer),
    )


def _device_and_offload(
    module: nn.Module, mesh: Mesh, settings: ShardingSettings, dense: DataParallelAxes
) -> tuple[torch.device, Offload | None]:
    """Where the model computes, and whether shards are kept on the host."""
    device = computing_device(module, mesh, settings.device)
    gathers = all(strategy.gathers for strategy in settings.strategies.values())
    offload = resolve_offload(settings.offload_policy, device, dense, gathers=gathers)
    if offload is None or settings.device is not None:
        return device, offload
    # A model that has to be offloaded may not fit on the device: its parameters may be on the
    # host, and then say nothing about where it computes.
    device = computing_device(nn.Module(), mesh, None)
    return device, resolve_offload(settings.offload_policy, device, dense)
