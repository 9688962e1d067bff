"""Aliases, copies, casts and factories of a ShardedTensor: operations that move whole spans."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from lamina.buffers.compat import OpOverload
from lamina.buffers.layout.boxes import boxes_of_span
from lamina.buffers.tensors.span_tensor import HandlerTable, SpanTensor

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
    func: OpOverload,
    source: SpanTensor,
    *args: Any,
    memory_format: torch.memory_format | None = None,
    **kwargs: Any,
) -> SpanTensor:
    """The result has the operand's span. Spans are flat: there is no memory format to keep."""
    return source._with(func(source._local, *args, **kwargs))


@HANDLERS.handles(aten.is_pinned.default)
def _on_span(func: OpOverload, source: SpanTensor, *args: Any, **kwargs: Any) -> Any:
    return func(source._local, *args, **kwargs)


@HANDLERS.handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten._reshape_alias.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def _other_shape(func: OpOverload, source: SpanTensor, *args: Any, **kwargs: Any) -> SpanTensor:
    """Views that keep row-major order: the span is the same run of elements under a new shape."""
    # A meta tensor lets torch resolve -1 and negative dimensions, and refuse what does not fit.
    meta = torch.empty(source.shape, device="meta")
    shape = func(meta, *args, **kwargs).shape
    return source._with(source._local.view(-1), replace(source._spec, shape=shape))


@HANDLERS.handles(aten.copy_.default)
def _copy(
    func: OpOverload, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> torch.Tensor:
    if not isinstance(target, SpanTensor):
        raise NotImplementedError(
            f"copy_ of a ShardedTensor of shape {list(source.shape)} into a plain tensor: copy "
            ".full_tensor() (collective), or .to_local() for this rank's span"
        )
    spec = target._spec
    if isinstance(source, SpanTensor):
        spec.must_match(source._spec, "copy_")
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
    return target


def narrowed(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A box of a tensor as a view; the tensor itself where the box is all of it."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        # Some subclasses can be cut along their first dimension only.
        if (offset, size) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def copy_span(
    target: torch.Tensor, source: torch.Tensor, start: int, stop: int, non_blocking: bool = False
) -> None:
    """Copy elements `start..stop` of `source`, of any strides and dtype, into flat `target`.

    A non-contiguous source is not copied whole first: the span is taken box by box.
    """
    if source.is_contiguous():
        target.copy_(source.view(-1)[start:stop], non_blocking=non_blocking)
        return
    for box in boxes_of_span(source.shape, start, stop):
        into = target[box.start : box.start + box.numel].view(box.sizes)
        into.copy_(narrowed(source, box.offsets, box.sizes), non_blocking=non_blocking)


@HANDLERS.handles(aten.index_put_.default)
def _masked_write(
    func: OpOverload,
    target: SpanTensor,
    indices: Sequence[torch.Tensor | None],
    value: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor:
    """`t[mask] = number` with a mask cut alike is pointwise; other indices are refused."""
    mask = _mask_of(target, indices)
    if mask is None or value.numel() != 1 or isinstance(value, SpanTensor) or accumulate:
        raise NotImplementedError(
            f"{func}: only t[mask] = number works on a ShardedTensor, with a boolean ShardedTensor "
            "cut alike as the mask: use torch.where, or .to_local()"
        )
    target._local.masked_fill_(mask, value.reshape(()))
    return target


def _mask_of(target: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """The mask as it meets the target's span, or None where the index is something else."""
    if not isinstance(target, SpanTensor) or len(indices) != 1:
        return None
    mask, spec = indices[0], target._spec
    if isinstance(mask, SpanTensor):
        return mask._local if mask.dtype is torch.bool and mask._spec.matches(spec) else None
    if mask is not None and mask.numel() <= 1 == spec.numel:
        # torch reads a 0-d mask as a truth value (alike on every rank) and makes an index of it:
        # the one element, or none.
        return torch.full((), bool(mask.numel()), device=target.device)
    return None


@HANDLERS.handles(
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default
)
def _new(
    func: OpOverload, source: SpanTensor, size: Sequence[int], *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Of this tensor's own shape: a tensor cut alike. Of another: a plain tensor."""
    if tuple(size) != tuple(source.shape):
        made: torch.Tensor = func(source._local, size, *args, **kwargs)
        return made
    return source._with(func(source._local, [source._local.numel()], *args, **kwargs))
