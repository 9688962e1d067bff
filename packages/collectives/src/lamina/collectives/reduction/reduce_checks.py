"""What the reductions refuse, and the one factor they apply."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Literal

import torch

from lamina.collectives.call.checks import (
    WIRE_DTYPES,
    overlap,
    require_disjoint,
    require_flat,
    require_same_device,
)
from lamina.collectives.transport.groups import group_rank, group_size, served_by_gloo, where

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "SumOp",
    "check_all_reduce",
    "check_reduce_scatter",
    "factor_of",
    "scratch_for",
]

SumOp = Literal["sum", "avg"]
"""What a reduction makes of the terms; who adds them is `shaped.Reduction`."""


def factor_of(op: str, scale: float | None, size: int, wire: torch.dtype) -> float | None:
    """The one factor of the sum, or None where it is one."""
    factor = 1.0 if scale is None else float(scale)
    if op == "avg":
        factor /= size
    if wire != torch.float64:
        factor = ctypes.c_float(factor).value  # to the nearest, as C converts
    return None if factor == 1.0 else factor


def check_reduce_scatter(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    op: str,
    *,
    accumulate: bool,
) -> torch.device:
    """Refuse what a reduce-scatter cannot take; return the tensors' device.

    Raises:
        ValueError: op, shape, strides, dtype, device, size or shared memory.
    """
    device = _check_kinds(name, output, input, group, op)
    size = group_size(group)
    if input.numel() != size * output.numel():
        raise ValueError(
            f"{name} {where(group)}: `input` has {input.numel()} elements, which is not the "
            f"{size} x {output.numel()} that {size} ranks with an output of {output.numel()} need; "
            f"pad the buffer to a multiple of the number of ranks"
        )
    first = group_rank(group) * output.numel()
    own = input[first : first + output.numel()]
    _check_aliasing(name, output, input, own, group, accumulate=accumulate)
    return device


def check_all_reduce(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    op: str,
    *,
    accumulate: bool,
) -> torch.device:
    """Refuse what an all-reduce cannot take; return the tensors' device.

    Raises:
        ValueError: op, shape, strides, dtype, device, size or shared memory.
    """
    device = _check_kinds(name, output, input, group, op)
    if input.numel() != output.numel():
        raise ValueError(
            f"{name} {where(group)}: `output` has {output.numel()} elements and `input` "
            f"{input.numel()}; they must be equal"
        )
    _check_aliasing(name, output, input, input, group, accumulate=accumulate)
    return device


def _check_kinds(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    op: str,
) -> torch.device:
    """Refuse what no reduction can take; return the tensors' device."""
    if op not in ("sum", "avg"):
        raise ValueError(f"{name} {where(group)}: op must be 'sum' or 'avg', not {op!r}")
    require_flat(name, "output", output, group)
    require_flat(name, "input", input, group)
    if input.dtype not in WIRE_DTYPES:
        raise ValueError(
            f"{name} {where(group)}: `input` is {input.dtype}; the wire dtype must be one of "
            f"{', '.join(map(str, WIRE_DTYPES))}"
        )
    if output.dtype not in (torch.float32, input.dtype):
        raise ValueError(
            f"{name} {where(group)}: `output` is {output.dtype}; it must be torch.float32 or the "
            f"wire dtype {input.dtype}"
        )
    return require_same_device(name, group, output=output, input=input)


def _check_aliasing(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    own: torch.Tensor,
    group: ProcessGroup | None,
    *,
    accumulate: bool,
) -> None:
    """Refuse an output that shares memory with the input, unless it is exactly `own`."""
    in_place = (
        overlap(output, own)
        and output.data_ptr() == own.data_ptr()
        and output.dtype == own.dtype
        and not accumulate
    )
    if not in_place:
        require_disjoint(
            name,
            group,
            ("output", output),
            ("input", input),
            unless="only an output of the same dtype that is exactly this rank's own piece of the "
            "input may, and only without accumulate",
        )


def scratch_for(
    name: str,
    given: torch.Tensor | None,
    numel: int,
    input: torch.Tensor,
    output: torch.Tensor,
    group: ProcessGroup | None,
) -> torch.Tensor | None:
    """Scratch for `numel` received elements; None where the transport finds its own (CPU)."""
    if given is None:
        on_cpu = input.device.type == "cpu" and served_by_gloo(group, input.device)
        return None if on_cpu else torch.empty(numel, dtype=input.dtype, device=input.device)
    require_flat(name, "scratch", given, group)
    require_same_device(name, group, input=input, scratch=given)
    if given.dtype != input.dtype or given.numel() < numel:
        raise ValueError(
            f"{name} {where(group)}: `scratch` has {given.numel()} elements of {given.dtype}; it "
            f"needs at least {numel} of the wire dtype {input.dtype}"
        )
    require_disjoint(name, group, ("scratch", given), ("input", input))
    require_disjoint(name, group, ("scratch", given), ("output", output))
    return given
