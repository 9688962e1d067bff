"""Aliases, copies, casts and factories of a ShardedTensor: operations that move whole spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lamina.buffers.layout.boxes import boxes_of_span
from lamina.buffers.tensors.handlers import HandlerTable

if TYPE_CHECKING:
    from lamina.buffers.tensors.sharded_tensor import ShardedTensor

__all__ = ["HANDLERS", "copy_span"]

HANDLERS = HandlerTable()
aten = torch.ops.aten


@HANDLERS.handles(
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.lift_fresh.default,
    aten.lift.default,
    aten._pin_memory.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
)
def _same_span(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ShardedTensor:
    """The result has the operand's span. Spans are flat: there is no memory format to keep."""
    source: ShardedTensor = args[0]
    keywords = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return cls._wrap(func(source._local, *args[1:], **keywords), source._spec)


@HANDLERS.handles(aten.is_pinned.default)
def _on_span(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


@HANDLERS.handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def _other_shape(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> ShardedTensor:
    """Views that keep row-major order: the span is the same run of elements under a new shape."""
    source: ShardedTensor = args[0]
    # A meta tensor lets torch resolve -1 and negative dimensions, and refuse what does not fit.
    meta = torch.empty(source.shape, device="meta")
    shape = func(meta, *args[1:], **kwargs).shape
    return cls._wrap(source._local.view(-1), source._spec.reshaped(shape))


@HANDLERS.handles(aten.copy_.default)
def _copy(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    target, source, *rest = args
    non_blocking = bool(rest[0] if rest else kwargs.get("non_blocking", False))
    if not isinstance(target, cls):
        raise NotImplementedError(
            f"copy_ of a ShardedTensor of shape {list(source.shape)} into a plain tensor: copy "
            ".full_tensor() (collective), or .to_local() for this rank's span"
        )
    spec = target._spec
    if isinstance(source, cls):
        if not spec.matches(source._spec):
            raise ValueError(
                f"copy_: target has shape {list(spec.shape)} span {spec.start}..{spec.stop}, "
                f"source shape {list(source.shape)} span {source.start}..{source.stop}: they are "
                "cut differently; go through torch.distributed.checkpoint or .full_tensor()"
            )
        target._local.copy_(source._local, non_blocking=non_blocking)
    elif source.dim() == 0:
        target._local.copy_(source, non_blocking=non_blocking)
    elif source.shape == spec.shape:
        copy_span(target._local, source, spec.start, spec.stop, non_blocking)
    else:
        raise ValueError(
            f"copy_: a plain tensor of shape {list(source.shape)} is not the whole of a "
            f"ShardedTensor of shape {list(spec.shape)}: pass the whole tensor, or copy into "
            ".to_local()"
        )
    result: torch.Tensor = target
    return result


def copy_span(
    target: torch.Tensor,
    source: torch.Tensor,
    start: int,
    stop: int,
    non_blocking: bool = False,
) -> None:
    """Copy elements `start..stop` of `source`, of any strides and dtype, into flat `target`.

    A non-contiguous source is not copied whole first: the span is taken box by box.
    """
    if source.is_contiguous():
        target.copy_(source.view(-1)[start:stop], non_blocking=non_blocking)
        return
    for box in boxes_of_span(source.shape, start, stop):
        piece = source
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            piece = piece.narrow(dim, offset, size)
        into = target[box.start : box.start + box.numel].view(box.sizes)
        into.copy_(piece, non_blocking=non_blocking)


@HANDLERS.handles(aten.index_put_.default)
def _masked_write(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """`t[mask] = number` with a mask cut alike is pointwise; other indices are refused."""
    target, indices, value, *rest = args
    mask = _mask_of(cls, target, indices)
    if mask is None or value.numel() != 1 or isinstance(value, cls) or any(rest):
        raise NotImplementedError(
            f"{func}: only t[mask] = number works on a ShardedTensor, with a boolean ShardedTensor "
            "cut alike as the mask: use torch.where, or .to_local()"
        )
    target._local.masked_fill_(mask, value.reshape(()))
    result: torch.Tensor = target
    return result


def _mask_of(cls: type[ShardedTensor], target: Any, indices: Any) -> torch.Tensor | None:
    """The mask as it meets the target's span, or None where the index is something else."""
    if not isinstance(target, cls) or len(indices) != 1:
        return None
    mask, spec = indices[0], target._spec
    if isinstance(mask, cls):
        return mask._local if mask.dtype is torch.bool and mask._spec.matches(spec) else None
    if isinstance(mask, torch.Tensor) and mask.numel() <= 1 == spec.numel:
        # torch reads a 0-d mask as a truth value (alike on every rank) and makes an index of it:
        # the one element, or none.
        return torch.full((), bool(mask.numel()), device=target.device)
    return None


@HANDLERS.handles(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default
)
def _new(
    cls: type[ShardedTensor],
    func: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Of this tensor's own shape: a ShardedTensor cut alike. Of another: a plain tensor."""
    source, size, *rest = args
    if tuple(size) != tuple(source.shape):
        made: torch.Tensor = func(source._local, size, *rest, **kwargs)
        return made
    return cls._wrap(func(source._local, [source._spec.local_numel], *rest, **kwargs), source._spec)
