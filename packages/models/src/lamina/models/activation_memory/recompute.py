"""Recomputation and offload: less activation memory for more computation or host memory.

`apply_recompute` changes what a model's blocks save for backward, and never what they compute. It
replaces the `forward` of modules on the instance, so names, parameters and hooks stay as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lamina.mesh.engine import recompute_contexts
from lamina.models.activation_memory.offload import Offloader
from lamina.models.activation_memory.selective import Discarder
from lamina.models.attention.attention import AttentionCore
from lamina.models.base.configs.field_checks import (
    refuse_unread,
    require_at_least,
    require_choices,
)
from lamina.models.compat import one_graph_break
from lamina.models.decoder.layer_stack import ResidualBlock, TransformerBlock
from lamina.models.layers.dropout import Dropout
from lamina.models.layers.mlp import ActivationFunction
from lamina.models.layers.norms import LayerNorm, RMSNorm
from lamina.models.mamba.block import GatedNorm, StateSpaceScan
from lamina.models.mamba.convolution import CausalConvolution
from lamina.models.mamba.delta_net import DeltaRule, GatedHeadNorm
from lamina.models.mamba.selective import SelectiveScan
from lamina.models.moe.router import TopKRouter
from lamina.models.precision.fp8_products import Float8Products, replaying_scales

Kind = Literal["none", "full", "selective", "offload"]
Operation = Literal["attention", "norm", "activation", "scan"]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "attention": (AttentionCore,),
    "norm": (RMSNorm, LayerNorm, GatedNorm, GatedHeadNorm),
    "activation": (ActivationFunction,),
    "scan": (CausalConvolution, StateSpaceScan, SelectiveScan, DeltaRule),
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
            if self.kind != kind:
                refuse_unread(self, [name], f"kind={self.kind!r} is not {kind!r}")
        if self.kind == "none":
            refuse_unread(self, ["every"], "kind='none' applies to no block")


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
    model_blocks = [module for module in model.modules() if isinstance(module, blocks)]
    if not model_blocks:
        names = ", ".join(block.__name__ for block in blocks)
        raise ValueError(f"{type(model).__name__} has no {names}: pass your blocks' classes")
    offloader = Offloader()
    for index, block in enumerate(model_blocks):
        for module in block.modules():
            if is_recomputed(module):
                del module.forward
        if index % policy.every == 0:
            _apply(block, policy, offloader, index // policy.every)
    return model


def is_recomputed(module: nn.Module) -> bool:
    """Whether `apply_recompute` has replaced this module's forward."""
    return isinstance(getattr(module.__dict__.get("forward"), "__self__", None), _Replaced)


def _apply(block: nn.Module, policy: RecomputePolicy, offloader: Offloader, index: int) -> None:
    if policy.kind == "full":
        _Checkpointed(block)
    elif policy.kind == "offload":
        _Within(block, partial(offloader.hooks, block, index, policy.min_numel))
    elif policy.kind == "selective":
        chosen = tuple(kind for name in policy.operations for kind in _MODULES[name])
        discarder = Discarder()
        for module in block.modules():
            if isinstance(module, chosen):
                _Discarded(module, discarder)
        _Within(block, discarder.hooks, graphs_know=True)


class _Replaced(ABC):
    """Owns a module's forward: its own `run` stands in the module's place of it.

    Note [bound methods]: a bound method of an object, unlike a closure, follows the module through
    deepcopy and pickle. And it is the one kind of replacement that Dynamo guards by its code, which
    all blocks share. Any other callable (a partial, say) is guarded by its identity, so that every
    block would be compiled by itself, until torch's `recompile_limit` stops all compilation.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., Any] = module.forward
        module.forward = self.run

    @abstractmethod
    def run(self, *inputs: Any, **options: Any) -> Any:
        """Compute what `forward` does, and save what the policy says."""


class _Checkpointed(_Replaced):
    """A block that saves its inputs and runs again."""

    def run(self, *inputs: Any, **options: Any) -> Any:
        """See `_Replaced.run`."""
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **options)
        if torch.compiler.is_compiling():
            own = not isinstance(self.module, (TransformerBlock, ResidualBlock))
            if own or _replays(self.module):
                return _outside_of_graphs(self.run, *inputs, **options)
            # torch's compiler supports no contexts of others, and draws the same numbers by itself.
            return checkpoint(self.forward, *inputs, use_reentrant=False, **options)
        contexts = replaying_scales(self.module, recompute_contexts)
        return checkpoint(
            self.forward, *inputs, use_reentrant=False, context_fn=contexts, **options
        )


class _Discarded(_Replaced):
    """An operation whose output is not saved."""

    def __init__(self, module: nn.Module, discarder: Discarder) -> None:
        super().__init__(module)
        self.discarder = discarder

    def run(self, *inputs: Any, **options: Any) -> Any:
        """See `_Replaced.run`."""
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **options)
        if torch.compiler.is_compiling():
            if _replays(self.module):
                return _outside_of_graphs(self.run, *inputs, **options)
            # What a compiled graph saves, the compiler chooses. It is told that this operation
            # runs again, and then saves its output for no product either, as `Discarder` does.
            return checkpoint(self.forward, *inputs, use_reentrant=False, **options)
        return self.discarder.run(self.module, self.forward, *inputs, **options)


class _Within(_Replaced):
    """A block that runs inside hooks for what autograd saves.

    Where a graph tells autograd by itself what not to save (`graphs_know`), it needs none.
    """

    def __init__(
        self,
        module: nn.Module,
        hooks: Callable[[], AbstractContextManager[Any]],
        *,
        graphs_know: bool = False,
    ) -> None:
        super().__init__(module)
        self.hooks, self.graphs_know = hooks, graphs_know

    def run(self, *inputs: Any, **options: Any) -> Any:
        """See `_Replaced.run`."""
        if not torch.is_grad_enabled():
            return self.forward(*inputs, **options)
        if torch.compiler.is_compiling():
            if self.graphs_know:
                return self.forward(*inputs, **options)
            return _around_graphs(self.hooks, self.forward, *inputs, **options)
        with self.hooks():
            return self.forward(*inputs, **options)


def _replays(module: nn.Module) -> bool:
    """Whether a module that runs again needs more state than torch's default generators."""
    return any(
        (isinstance(part, Float8Products) and part.amax_history is not None)
        or (isinstance(part, (Dropout, AttentionCore)) and part.sharded and part.rate > 0.0)
        or (isinstance(part, TopKRouter) and part.moe.jitter > 0.0)
        for part in module.modules()
    )


@one_graph_break
def _outside_of_graphs(run: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run uncompiled, because the compiler chooses what autograd saves in a compiled graph."""
    return run(*inputs, **options)


@partial(one_graph_break, recursive=False)
def _around_graphs(
    hooks: Callable[[], AbstractContextManager[Any]],
    forward: Callable[..., Any],
    *inputs: Any,
    **options: Any,
) -> Any:
    """Enter hooks uncompiled; inside, `forward` is compiled, and what it saves goes to them."""
    with hooks():
        return forward(*inputs, **options)
