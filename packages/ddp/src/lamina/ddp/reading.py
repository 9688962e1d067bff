"""Parameters as their makers left them, read into one flat tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lamina.buffers import BufferLayout
from lamina.ddp.grouping import ParameterRef

__all__ = ["read_parameters"]


def read_parameters(
    refs: Sequence[ParameterRef], layout: BufferLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """All parameters as one flat tensor, laid out; their own memory where they lie like that.

    Args:
        refs: materialised parameters, in the layout's order.
        layout: where each lies.
        dtype: of the result.
        device: of the result.
    """
    whole = _laid_out_already(refs, layout, dtype, device)
    if whole is None:
        whole = torch.zeros(layout.size, dtype=dtype, device=device)
        with torch.no_grad():
            for ref, spec in zip(refs, layout.specs, strict=True):
                offset = layout.offset(spec.name)
                whole[offset : offset + spec.numel].view(spec.shape).copy_(ref.parameter)
    return whole


def _laid_out_already(
    refs: Sequence[ParameterRef], layout: BufferLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The parameters' own memory, where somebody made them as the layout has them."""
    sizes = zip(refs, layout.specs, strict=True)
    held = [(ref.parameter, spec) for ref, spec in sizes if spec.numel]
    if not held:
        return None
    first, spec = held[0]
    storage = first.untyped_storage()
    base = first.storage_offset() - layout.offset(spec.name)
    end = (base + layout.size) * first.element_size()
    if base < 0 or end > storage.nbytes() or first.dtype != dtype or first.device != device:
        return None
    for parameter, spec in held:
        if (
            parameter.untyped_storage().data_ptr() != storage.data_ptr()
            or parameter.storage_offset() - base != layout.offset(spec.name)
            or parameter.dtype != first.dtype
            or not parameter.is_contiguous()
        ):
            return None
    whole = torch.empty(0, dtype=dtype, device=device)
    with torch.no_grad():
        whole.set_(storage, base, (layout.size,), (1,))
        for start, stop in layout.padding_ranges():
            whole[start:stop].zero_()
    return whole
