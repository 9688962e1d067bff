"""Recomputation and offload: less activation memory for more computation or host memory.

`apply_recompute` changes what a model's blocks save for backward, and never what they compute. It
replaces the `forward` of modules on the instance, so names, parameters and hooks stay as they are.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lamina.mesh.engine import recompute_contexts
from lamina.models.activation_memory.offload import Offloader
from lamina.models.activation_memory.selective import Discarder
from lamina.models.attention.attention import AttentionCore
from lamina.models.base.configs.field_checks import require_at_least, require_choices
from lamina.models.compat import one_graph_break
from lamina.models.decoder.layer_stack import ResidualBlock, TransformerBlock
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.layers.norms import LayerNorm, RMSNorm
from lamina.models.mamba.block import CausalConvolution, GatedNorm, StateSpaceScan
from lamina.models.moe.router import TopKRouter
from lamina.models.precision.fp8_products import Float8Products, replaying_scales

__all__ = ["RecomputePolicy", "apply_recompute", "is_recomputed"]

Kind = Literal["none", "full", "selective", "offload"]
Operation = Literal["attention", "norm", "activation", "scan"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (AttentionCore,),
    "norm": (RMSNorm, LayerNorm, GatedNorm),
    "activation": (ActivationFunction,),
    "scan": (CausalConvolution, StateSpaceScan),
}


@dataclass(frozen=True, kw_only=True)
class RecomputePolicy:
    """What blocks save for backward.

    Args:
        kind: `none` saves everything. `full` saves a block's input and runs the block again.
            `selective` does not save what the named operations return, and computes it again when
            backward needs it. `offload` moves saved tensors to host memory (there is nothing to do
            on a CPU), and copies them back while the block after them is in its backward.
        every: apply the policy to every n-th block, from the first.
        operations: for `selective`: `attention` (scores, softmax, mixing), `norm`,
            `activation`, `scan` (Mamba's convolution, decays and states). None of them
            contains a matrix product with a weight.
        min_numel: for `offload`: smaller tensors stay on the device.

    Raises:
        ValueError: for a kind or operation that does not exist, no operation, `every` below 1,
            or a setting that the kind does not use.

    Examples:
        >>> policy = RecomputePolicy(kind="selective", operations=["attention"])
    """

    kind: Kind = "none"
    every: int = 1
    operations: Sequence[Operation] = get_args(Operation)
    min_numel: int = 1 << 16

    def __post_init__(self) -> None:
        require_choices(self, RecomputePolicy)
        unknown = sorted(set(self.operations) - set(get_args(Operation)))
        if unknown:
            raise ValueError(f"operations {unknown} do not exist: take of {get_args(Operation)}")
        require_at_least(1, self, "every")
        if self.kind == "selective" and not self.operations:
            raise ValueError(f"operations is empty: name some of {get_args(Operation)}")
        for name, kind in (("operations", "selective"), ("min_numel", "offload")):
            given = getattr(self, name)
            if self.kind != kind and given != getattr(RecomputePolicy, name):
                raise ValueError(
                    f"{name}={given!r} with kind={self.kind!r}, which does not look at it: only "
                    f"kind={kind!r} does"
                )


def apply_recompute(
    model: ModuleT,
    policy: RecomputePolicy | Kind,
    *,
    blocks: tuple[type[nn.Module], ...] = (TransformerBlock, ResidualBlock),
) -> ModuleT:
    """Make a model's blocks save what the policy says. Losses and gradients keep their bits.

    A second call replaces the first. Dropout that runs again draws the same numbers, also inside
    `lamina.mesh.rng_stream`.

    Args:
        model: holds the blocks, at any depth. Changed in place.
        policy: a policy, or the name of a kind.
        blocks: classes of modules that are blocks.

    Returns:
        `model`.

    Raises:
        ValueError: if the model has no such block.

    Examples:
        >>> config = TransformerConfig(vocab_size=256, hidden_size=64, num_layers=2, num_heads=4)
        >>> model = apply_recompute(GPTModel(config), "full")
    """
    if isinstance(policy, str):
        policy = RecomputePolicy(kind=policy)
    found = [module for module in model.modules() if isinstance(module, blocks)]
    if not found:
        names = ", ".join(block.__name__ for block in blocks)
        raise ValueError(f"{type(model).__name__} has no {names}: pass your blocks' classes")
    offloader = Offloader()
    for index, block in enumerate(found):
        for module in block.modules():
            if is_recomputed(module):
                del module.forward
        if index % policy.every == 0:
            _apply(block, policy, offloader, index // policy.every)
    return model


def is_recomputed(module: nn.Module) -> bool:
    """Whether `apply_recompute` has replaced this module's forward."""
    return isinstance(module.__dict__.get("forward"), _Replaced)


def _apply(block: nn.Module, policy: RecomputePolicy, offloader: Offloader, index: int) -> None:
    if policy.kind == "full":
        block.forward = _Replaced(_checkpointed, block, block.forward)
    elif policy.kind == "offload":
        hooks = partial(offloader.hooks, block, index, policy.min_numel)
        block.forward = _Replaced(_within, hooks, block.forward)
    elif policy.kind == "selective":
        chosen = tuple(kind for name in policy.operations for kind in _MODULES[name])
        discarder = Discarder()
        for module in block.modules():
            if isinstance(module, chosen):
                module.forward = _Replaced(discarder.run, module, module.forward)
        block.forward = _Replaced(_within, discarder.hooks, block.forward)


class _Replaced(partial[Any]):
    """A forward that `apply_recompute` has set on a module.

    It has a class of its own so that it can be recognised. A partial over bound methods, unlike a
    closure, follows the module through deepcopy and pickle.
    """


def _checkpointed(
    block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    if torch.compiler.is_compiling():
        if _replays(block):
            return _outside_of_graphs(_checkpointed, block, forward, *inputs, **options)
        # torch's compiler supports no contexts of others, and draws the same numbers by itself.
        return checkpoint(forward, *inputs, use_reentrant=False, **options)
    contexts = replaying_scales(block, recompute_contexts)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


def _replays(block: nn.Module) -> bool:
    """Whether a block that runs again needs more state than torch's default generators."""
    return not isinstance(block, (TransformerBlock, ResidualBlock)) or any(
        (isinstance(module, Float8Products) and module.amax_history is not None)
        or (isinstance(module, (Dropout, AttentionCore)) and module.sharded and module.rate > 0.0)
        or (isinstance(module, TopKRouter) and module.moe.jitter > 0.0)
        for module in block.modules()
    )


@one_graph_break
def _outside_of_graphs(run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run uncompiled, because the compiler chooses what autograd saves in a compiled graph."""
    return run(*inputs, **options)


def _within(
    hooks: Callable[[], AbstractContextManager[Any]],
    forward: Callable[..., Tensor],
    *inputs: Any,
    **options: Any,
) -> Tensor:
    if not torch.is_grad_enabled():
        return forward(*inputs, **options)
    if torch.compiler.is_compiling():
        return cast(Tensor, _outside_of_graphs(_within, hooks, forward, *inputs, **options))
    with hooks():
        return forward(*inputs, **options)
