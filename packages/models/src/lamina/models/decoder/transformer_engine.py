"""Projections by NVIDIA's Transformer Engine (the extra `lamina-models[te]`).

`transformer_engine.pytorch.Linear` replaces the cut layers in a block. The parameters have the same
names, shapes, roles and initial values, and tokens and features are cut over ranks in the same way.
"""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from types import ModuleType
from typing import Any, cast

import torch
from torch import nn

from lamina.mesh import mark, role_of
from lamina.mesh.engine import MeshAxis, mesh_axis
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.initialise import fill, normal
from lamina.models.base.mesh_axes import MeshLike, axis_of
from lamina.models.layers.linear import ColumnParallelLinear, RowParallelLinear


class PrecisionUnavailableError(RuntimeError):
    """A precision needs a library or a device that this machine does not have."""


def transformer_engine() -> tuple[ModuleType, ModuleType]:
    """Import TE's `pytorch` and `common.recipe`; PrecisionUnavailableError says why that fails."""
    try:
        return (
            importlib.import_module("transformer_engine.pytorch"),
            importlib.import_module("transformer_engine.common.recipe"),
        )
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # A wheel that does not fit the installed torch or CUDA may raise any of these.
        raise PrecisionUnavailableError(
            "backend 'transformer_engine': transformer_engine.pytorch cannot be imported "
            f"({type(error).__name__}: {error}). Install lamina-models[te] on a machine with CUDA "
            "and cuDNN, or use Precision(backend='torch-fp8'), which needs torch only"
        ) from error


def make_recipe(precision: Precision) -> Any:
    """Transformer Engine's recipe for a precision."""
    _, recipes = transformer_engine()
    if precision.amax == "delayed":
        return recipes.DelayedScaling(
            fp8_format=recipes.Format.HYBRID,
            amax_history_len=precision.history,
            amax_compute_algo="max",
        )
    kinds = {
        "tensorwise": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "mxfp8": recipes.MXFP8BlockScaling,
        "nvfp4": recipes.NVFP4BlockScaling,
    }
    return kinds[precision.scaling]()


def use_transformer_engine(
    root: nn.Module, blocks: list[nn.Module], precision: Precision, mesh: MeshLike = None
) -> None:
    """Replace the cut layers inside blocks, and run root and blocks inside TE's autocast.

    Blocks are included because recomputation runs them outside of the root's forward, which updates
    the histories of delayed scaling, once. Ranks of `mesh` share maxima.
    """
    recipe = make_recipe(precision)
    for block in blocks:
        for parent in list(block.modules()):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
                    setattr(parent, name, make_linear(layer, precision))
    group = amax_group(mesh)
    for module in {id(m): m for m in (*blocks, root)}.values():
        module.forward = _Autocast(run_inside, recipe, group, module.forward)


def make_linear(layer: ColumnParallelLinear | RowParallelLinear, precision: Precision) -> nn.Module:
    """Make Transformer Engine's layer for one of ours, and copy its weights unless on meta."""
    te, _ = transformer_engine()
    arguments = linear_arguments(layer)
    roles = {name: asdict(role_of(p)) for name, p in layer.named_parameters(recurse=False)}
    quantized: AbstractContextManager[Any] = nullcontext()
    if precision.quantized_weights:
        quantized = te.quantized_model_init(
            enabled=True, recipe=make_recipe(precision), preserve_high_precision_init_val=True
        )
    with quantized:
        made: Any = _linear_class(te.Linear)(**arguments)
    made.roles = roles
    made.mark_roles()
    if not layer.weight.is_meta:
        with torch.no_grad():
            for name, parameter in layer.named_parameters(recurse=False):
                getattr(made, name).copy_(parameter)
    return cast(nn.Module, made)


def linear_arguments(layer: ColumnParallelLinear | RowParallelLinear) -> dict[str, Any]:
    """Arguments of `te.pytorch.Linear`. Sizes are those over all ranks; it divides them itself."""
    size = 1 if layer.axis is None else layer.axis.size
    rows, columns = layer.weight.shape
    column = isinstance(layer, ColumnParallelLinear)
    cut: dict[str, Any] = {"axis": layer.axis, "dim": 1}
    if isinstance(layer, ColumnParallelLinear):
        if layer.gather_output:
            raise ValueError(
                "gather_output=True: Transformer Engine's Linear leaves its output cut"
            )
        cut |= {"dim": 0, "blocks": layer.fused}
    return {
        "in_features": columns if column else columns * size,
        "out_features": rows * size if column else rows,
        "bias": layer.bias is not None,
        "sequence_parallel": layer.sequence_parallel,
        "tp_group": None if layer.axis is None else layer.axis.group,
        "tp_size": size,
        "parallel_mode": None if layer.axis is None else "column" if column else "row",
        "init_method": partial(fill, draw=normal(layer.init_std), seed=layer.init_seed, **cut),
        "params_dtype": layer.weight.dtype,
        "device": "meta" if layer.weight.is_meta else layer.weight.device,
    }


@functools.cache
def _linear_class(base: type[nn.Module]) -> type[nn.Module]:
    class TransformerEngineLinear(base):  # type: ignore[misc, valid-type]
        """TE's Linear, whose parameters keep their roles when it makes new ones."""

        def reset_parameters(self, defer_init: bool | None = False) -> None:
            """Let TE make its parameters, and mark these as the old ones were."""
            super().reset_parameters(defer_init)
            self.mark_roles()

        def mark_roles(self) -> None:
            """Give the parameters the roles that `roles` has by their names."""
            for name, role in getattr(self, "roles", {}).items():
                mark(getattr(self, name), **role)

    return TransformerEngineLinear


def amax_group(mesh: MeshLike) -> Any:
    """The process group over which delayed scaling's maxima are shared, or None for one process."""
    if isinstance(mesh, MeshAxis):
        return mesh.group
    names = [name for name in ("dp_replicate", "dp_shard", "cp", "tp") if axis_of(mesh, name)]
    return None if mesh is None or not names else mesh_axis(mesh, names).group


class _Autocast(partial[Any]):
    """A forward inside TE's autocast. A partial follows the module through deepcopy and pickle."""


def run_inside(
    recipe: Any, group: Any, forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    """Run a forward inside Transformer Engine's autocast."""
    te, _ = transformer_engine()
    with te.autocast(enabled=True, recipe=recipe, amax_reduction_group=group):
        return forward(*inputs, **options)
