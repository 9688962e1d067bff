"""Setting the precision of the projections in a model's blocks."""

from collections.abc import Iterator
from typing import TypeVar

from torch import nn

from lamina.ddp.engine import has_gradient_sink
from lamina.models.base.configs.product_precision import Precision
from lamina.models.base.mesh_axes import MeshLike
from lamina.models.decoder.layer_stack import ResidualBlock, TransformerBlock
from lamina.models.decoder.transformer_engine import use_transformer_engine
from lamina.models.layers.linear import ColumnParallelLinear, RowParallelLinear
from lamina.models.precision.fp8 import MULTIPLE
from lamina.models.precision.fp8_products import AmaxExchange, Cut, Float8Products

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def apply_precision(
    model: ModuleT,
    precision: Precision,
    mesh: MeshLike = None,
    *,
    blocks: tuple[type[nn.Module], ...] = (TransformerBlock, ResidualBlock),
) -> ModuleT:
    """Make the projections inside a model's blocks multiply as the precision says.

    `GPTModel` does this itself for `TransformerConfig(precision=...)`. Call it before a wrapper
    (DDP, `fully_shard`) and before `apply_recompute`. With `torch` or `torch-fp8` a second
    call replaces the first. Layers that Transformer Engine's have replaced stay replaced.

    Args:
        model: holds the blocks, at any depth, in their order. Changed in place.
        precision: how to multiply, and which blocks to leave as they are.
        mesh: ranks that see other tokens or pieces; the histories of delayed scaling agree on them.
        blocks: classes of modules that are blocks; the `ColumnParallelLinear` and
            `RowParallelLinear` layers inside them are changed.

    Returns:
        `model`.

    Raises:
        ValueError: if no block is left to change, for widths that FP8 products do not support,
            or for a model that is in a wrapper already.
        PrecisionUnavailableError: `transformer_engine` where it is not installed.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> model = apply_precision(GPTModel(config), Precision(backend="torch"))
    """
    _require_bare(model)
    fixed = [name for name, layer in _projections(model) if layer.layout_invariant]
    if fixed and precision.backend != "torch":
        raise ValueError(
            f"apply_precision({precision.backend!r}) to {fixed[0]}, which has invariant=True: "
            "scales and kernels see what a rank has, so bits would depend on the layout"
        )
    named_blocks = [(name, m) for name, m in model.named_modules() if isinstance(m, blocks)]
    precision.check_blocks(len(named_blocks))
    _restore(model)
    first = precision.num_layers_at_start_in_bf16
    chosen = named_blocks[first : len(named_blocks) - precision.num_layers_at_end_in_bf16]
    if precision.backend == "transformer_engine":
        use_transformer_engine(model, [block for _, block in chosen], precision, mesh)
    elif precision.backend == "torch-fp8":
        for name, block in chosen:
            for inner, layer in _projections(block):
                _check_widths(".".join(filter(None, (name, inner))), layer)
                cut: Cut = "output" if isinstance(layer, ColumnParallelLinear) else "input"
                layer.float8 = Float8Products(precision, layer.axis, cut)
                layer.float8.to(layer.weight.device)
        if precision.amax == "delayed":
            model.register_forward_pre_hook(AmaxExchange(mesh))
    return model


def _require_bare(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if has_gradient_sink(parameter) or hasattr(parameter, "placements"):
            raise ValueError(
                f"{name} belongs to a data-parallel wrapper (or is a DTensor) already: new layers "
                "would lose its values and buffers; call apply_precision before the wrapper"
            )


def amax_exchanges(model: nn.Module) -> list[AmaxExchange]:
    """The hook that shifts the histories of a model's delayed scaling: one, or none."""
    return [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, AmaxExchange)]


def float8_weights(model: nn.Module) -> list[str]:
    """Names of the weights that are multiplied in FP8 by `torch-fp8`.

    `lamina.fsdp.MixedPrecisionPolicy(weight_codec=Float8Codec(), encoded=...)` takes them: these
    weights can be gathered in FP8 too.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> names = float8_weights(GPTModel(config))
    """
    return [
        f"{name}.weight" if name else "weight"
        for name, layer in _projections(model)
        if layer.float8 is not None
    ]


def _projections(
    module: nn.Module,
) -> Iterator[tuple[str, ColumnParallelLinear | RowParallelLinear]]:
    for name, layer in module.named_modules():
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear)):
            yield name, layer


def _check_widths(name: str, layer: ColumnParallelLinear | RowParallelLinear) -> None:
    for width in layer.weight.shape:
        if width % MULTIPLE:
            size = 1 if layer.axis is None else layer.axis.size
            raise ValueError(
                f"{name}.weight is {tuple(layer.weight.shape)} on each of {size} tp ranks: FP8 "
                f"products need widths divisible by {MULTIPLE}, and {width} is not (remainder "
                f"{width % MULTIPLE}): change hidden_size, ffn_size or head_dim, or lower tp"
            )


def _restore(model: nn.Module) -> None:
    for _, layer in _projections(model):
        layer.float8 = None
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, AmaxExchange):
            del model._forward_pre_hooks[key]
