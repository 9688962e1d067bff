"""Tensor parallelism for an existing model, by torch's `parallelize_module`."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lamina.mesh import role_of
from lamina.mesh.engine import MeshAxis, copy_role
from lamina.models.activation_memory.recompute import is_recomputed
from lamina.models.base.config import TransformerConfig
from lamina.models.base.initialise import agree, check_same_seed, differing_tensors
from lamina.models.base.mesh_axes import cut_weight
from lamina.models.decoder.gpt import HOOKS, GPTModel, require_gpt
from lamina.models.decoder.precision_backends import amax_exchanges, apply_precision
from lamina.models.precision.fp8_products import Float8Products
from lamina.models.transformers_plan import CutByOwnPlan, axis_of_plan


class CutOverRanks(ParallelStyle):
    """Cut a whole `GPTModel`, the same on all ranks, over the ranks of a mesh, in place.

    torch's own styles cut a weight into runs of rows. That would be wrong for projections that are
    fused into one weight (queries, keys and values; gate and up), which are cut separately here.
    Arguments are those of `tensor_parallel_plan`.
    """

    def __init__(self, *, sequence_parallel: bool | None = None) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = require_gpt(module, "CutOverRanks")
        if module.axis is not None:
            raise ValueError(f"the model is cut over {module.axis.name} already")
        axis = axis_of_plan(device_mesh)
        config = module.config
        _require_as_made(module, axis)
        if self.sequence_parallel is not None:
            config = replace(config, sequence_parallel=self.sequence_parallel)
        _require_same(module, config, axis)
        wholes, buffers = dict(module.named_parameters()), dict(module.named_buffers())
        modes = {name: each.training for name, each in module.named_modules()}
        with torch.device("meta"):
            module.build(config, axis if axis.size > 1 else None)
            earlier_axes = [each for hook in amax_exchanges(module) for each in hook.axes]
            apply_precision(module, config.precision, axis if axis.size > 1 else None)
        for hook in amax_exchanges(module):
            hook.axes = [*earlier_axes, *hook.axes]
        for name, parameter in list(module.named_parameters()):
            _put(module, name, _piece(wholes[name], parameter, axis))
        for name, _ in list(module.named_buffers()):
            _put(module, name, buffers[name])
        module.tie_weights()
        for name, each in module.named_modules():
            each.training = modes[name]
        return module


def _require_as_made(model: GPTModel, axis: MeshAxis) -> None:
    """Raise ValueError on every rank if the model was changed, as its modules are made again."""
    change = _change(model)
    if agree([int(bool(change))], axis) == [False]:
        change = change or f"the model of another rank of {axis.name} is not as its config makes it"
    if change:
        raise ValueError(
            f"{change}, and cutting makes all modules anew: change the model after "
            "parallelize_module, or in TransformerConfig"
        )


def _change(model: GPTModel) -> str:
    """Describe the first module that is not as the config makes it; empty if there is none."""
    with torch.device("meta"):
        fresh = GPTModel(model.config, seed=model.seed)
    have, made = dict(model.named_modules()), dict(fresh.named_modules())
    for name in filter(None, have | made):
        module, was = have.get(name), made.get(name)
        if module is None or was is None or type(module) is not type(was):
            change = "another layer, or apply_precision"
        elif is_recomputed(module):
            change = "apply_recompute"
        elif isinstance(module, Float8Products) and isinstance(was, Float8Products):
            change = "" if module.precision == was.precision else "apply_precision"
        else:
            change = _difference(module, was)
        if change:
            return f"{name} of the {type(model).__name__} is not as its config makes it ({change})"
    return ""


def _difference(module: nn.Module, was: nn.Module) -> str:
    """Describe a hook or a setting that was added to a module; empty if there is none."""
    for kind in HOOKS:
        if len(getattr(module, kind)) > len(getattr(was, kind)):
            return kind.strip("_").removesuffix("s").replace("_", " ")
    for name, made in vars(was).items():
        # Sizes are compared by the parameters' shapes. Other attributes may be state of a run.
        there = vars(module).get(name)
        settings = isinstance(made, (float, str, TransformerConfig))
        if settings and there != made:
            return f"{name} {there!r} in place of {made!r}"
    return ""


def _require_same(model: GPTModel, config: TransformerConfig, axis: MeshAxis) -> None:
    """Raise ValueError if the ranks hold different models, by bytes, or on meta by the seed."""
    if any(parameter.is_meta for parameter in model.parameters()):
        check_same_seed(model.seed, axis)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    differing = differing_tensors(tensors, [config], axis)
    if differing:
        raise ValueError(
            f"ranks of {axis.name} hold different models ({differing[0]}; {len(differing)} such in "
            "all), and each would keep a piece of its own: build GPTModel(config, seed=...) with "
            "one seed on all ranks, or load the same weights"
        )


def _piece(whole: nn.Parameter, like: nn.Parameter, axis: MeshAxis) -> nn.Parameter:
    """Cut a whole parameter according to the role of the parameter that it replaces."""
    role = role_of(like)
    piece = whole
    if role.tp_shard_dim is not None:
        cut = cut_weight(whole.detach(), role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
        # A copy even if the piece is a view, so that the whole can be freed.
        piece = nn.Parameter(cut.clone(), requires_grad=whole.requires_grad)
    copy_role(like, piece)
    return piece


def _put(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, tensor)


def tensor_parallel_plan(
    model: nn.Module,
    *,
    sequence_parallel: bool | None = None,
    check: bool = True,
    expert_parallel: bool = False,
) -> ParallelStyle:
    """Make the plan with which `parallelize_module(model, mesh["tp"], plan)` cuts the model.

    A model of transformers is cut by its own `tp_plan` (its config's `base_model_tp_plan`, and the
    head's), which may be set. It keeps its class and its names of parameters.

    Args:
        model: a whole `GPTModel`, or a live model of transformers, the same on all ranks (from one
            seed, or loaded); this is checked.
        sequence_parallel: also cut the tokens between the products; by default as in its config.
            Plans of transformers cannot.
        check: compare a model of transformers with the whole on 16 tokens, gradients included.
        expert_parallel: give each rank some experts of a model of transformers whole, by its
            `ep_plan`, instead of a part of each.

    Raises:
        TypeError: for another model, or if a layer of the plan is of a class that cannot be cut.
        ValueError: if the model is cut already, has no plan, or has a style without a counterpart.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> plan = tensor_parallel_plan(GPTModel(config))  # for torch's parallelize_module
    """
    if not isinstance(model, GPTModel) and hasattr(model, "tp_plan"):
        if sequence_parallel:
            raise ValueError(
                f"sequence_parallel of a {type(model).__name__}: plans of transformers cut no "
                "tokens; leave it out, or convert the model with from_huggingface"
            )
        return CutByOwnPlan(model, check=check, expert_parallel=expert_parallel)
    model = require_gpt(model, "tensor_parallel_plan")
    if expert_parallel:
        raise ValueError(
            "expert_parallel is for models of transformers: build GPTModel(config, mesh) with "
            "axes of experts, ParallelLayout(ep=...)"
        )
    if model.axis is not None:
        raise ValueError(f"the model is cut over {model.axis.name} already")
    return CutOverRanks(sequence_parallel=sequence_parallel)
