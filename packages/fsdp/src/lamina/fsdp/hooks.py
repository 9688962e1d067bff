"""What ties the engine to modules: forward hooks, and marks on the autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lamina.fsdp.engine import ShardingEngine
from lamina.fsdp.unit import PendingBackward, Unit

__all__ = ["attach_hooks"]


class _AfterBackward(torch.autograd.Function):
    """Identity on a unit's inputs whose backward runs when the unit's own has ended."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: ShardingEngine,
        unit: Unit,
        pending: PendingBackward,
        *inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.engine, ctx.unit, ctx.pending = engine, unit, pending
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.engine.after_backward(ctx.unit, ctx.pending)
        return (None, None, None, *gradients)


def attach_hooks(
    module: nn.Module,
    engine: ShardingEngine,
    unit: Unit,
    *,
    input_dtype: torch.dtype | None = None,
    output_dtype: torch.dtype | None = None,
) -> None:
    """Let a unit's module tell the engine when it runs.

    Args:
        module: the unit's module.
        engine: the model's engine.
        unit: the unit.
        input_dtype: cast floating inputs to this dtype first.
        output_dtype: cast floating outputs to this dtype.
    """

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        engine.before_forward(unit)
        if input_dtype is not None:
            args, kwargs = _cast((args, kwargs), input_dtype)
        if torch.is_grad_enabled():
            args, kwargs = _mark_inputs(engine, unit, args, kwargs)
        return args, kwargs

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def after(_: nn.Module, args: Any, output: Any) -> Any:
        if torch.is_grad_enabled():
            _mark_outputs(output, lambda: engine.before_backward(unit))
        engine.after_forward(unit)
        return output if output_dtype is None else _cast(output, output_dtype)

    module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    module.register_forward_hook(after)


def _mark_inputs(
    engine: ShardingEngine, unit: Unit, args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    leaves, spec = tree_flatten((args, kwargs))
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    if places:
        pending = unit.expect_backward()
        marked = _AfterBackward.apply(  # type: ignore[no-untyped-call]
            engine, unit, pending, *(leaves[i] for i in places)
        )
        for place, tensor in zip(places, marked, strict=True):
            leaves[place] = tensor
    marked_args, marked_kwargs = tree_unflatten(leaves, spec)
    return marked_args, marked_kwargs


def _mark_outputs(output: Any, before_backward: Callable[[], None]) -> None:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        before_backward()
        return gradient

    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.register_hook(hook)  # type: ignore[no-untyped-call]


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if torch.is_floating_point(t) else t, tree
    )
