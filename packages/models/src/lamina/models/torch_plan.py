"""Tensor parallelism for a model that exists already, by torch's ``parallelize_module``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lamina.mesh import MeshAxis, copy_role, mesh_axis, role_of
from lamina.models.cutting import cut_weight
from lamina.models.gpt import GPTModel
from lamina.models.precision.backends import amax_exchanges, apply_precision
from lamina.models.precision.fp8_products import Float8Products
from lamina.models.recompute import is_recomputed


class CutOverRanks(ParallelStyle):
    """Cut a whole `GPTModel`, the same on all ranks, over the ranks of a mesh, in place.

    torch's own styles cut a weight into runs of rows, which would tear apart projections that are
    fused into one weight (queries, keys and values; gate and up); this one knows what is fused.

    Args:
        sequence_parallel: also cut the tokens of what lies between the products; by default as in
            the model's config.

    """

    def __init__(self, *, sequence_parallel: bool | None = None) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, GPTModel):
            raise TypeError(
                f"CutOverRanks is for a GPTModel, not for {type(module).__name__}: give it to "
                "parallelize_module() with the model itself"
            )
        if module.axis is not None:
            raise ValueError(f"the model is cut over {module.axis.name} already")
        names = device_mesh.mesh_dim_names
        if not names or len(names) != 1:
            raise ValueError(f"{device_mesh} must have one dimension with a name: pass mesh['tp']")
        axis = mesh_axis(device_mesh, names[0])
        config = module.config
        _require_as_made(module)
        if self.sequence_parallel is not None:
            config = replace(config, sequence_parallel=self.sequence_parallel)
        wholes, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        training = module.training
        with torch.device("meta"):
            module.build(config, axis if axis.size > 1 else None)
            seen_by = [each for hook in amax_exchanges(module) for each in hook.axes]
            apply_precision(module, config.precision, axis if axis.size > 1 else None)
        for hook in amax_exchanges(module):
            hook.axes = [*seen_by, *hook.axes]
        for name, parameter in list(module.named_parameters()):
            _put(module, name, _piece(wholes[name], parameter, axis))
        for name, _ in list(module.named_buffers()):
            _put(module, name, buffers[name])
        module.tie_weights()
        return module.train(training)


def _require_as_made(model: GPTModel) -> None:
    """Raise ValueError for changes that modules made anew from the config would not have."""
    with torch.device("meta"):
        fresh = GPTModel(model.config, seed=model.seed)
    have, made = dict(model.named_modules()), dict(fresh.named_modules())
    for name in filter(None, have | made):
        module, was = have.get(name), made.get(name)
        same = type(module) is type(was) and (module is None or not is_recomputed(module))
        if isinstance(module, Float8Products) and isinstance(was, Float8Products):
            same &= module.precision == was.precision
        if not same:
            raise ValueError(
                f"{name} of the {type(model).__name__} is not as its config makes it "
                "(apply_recompute, apply_precision or a change of yours), and cutting makes all "
                "modules anew: change the model after parallelize_module, or in TransformerConfig"
            )


def _piece(whole: nn.Parameter, place: nn.Parameter, axis: MeshAxis) -> nn.Parameter:
    """Cut a whole parameter as the one whose place it takes is marked."""
    role = role_of(place)
    piece = whole
    if role.tp_shard_dim is not None:
        held = cut_weight(whole.detach(), role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
        # A copy even where the cut is a view, so that the whole can be freed.
        piece = nn.Parameter(held.clone(), requires_grad=whole.requires_grad)
    copy_role(place, piece)
    return piece


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def tensor_parallel_plan(
    model: GPTModel, *, sequence_parallel: bool | None = None
) -> ParallelStyle:
    """Make the plan with which ``parallelize_module(model, mesh["tp"], plan)`` cuts the model.

    Args:
        model: a whole model, the same on all ranks (from one seed, or loaded).
        sequence_parallel: also cut the tokens between the products; by default as in its config.

    Raises:
        ValueError: if the model is cut already.

    """
    if model.axis is not None:
        raise ValueError(f"the model is cut over {model.axis.name} already")
    return CutOverRanks(sequence_parallel=sequence_parallel)
