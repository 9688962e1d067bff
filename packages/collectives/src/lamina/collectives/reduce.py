"""FP32-accumulating reduce-scatter and all-reduce with one order of summation.

Every rank sends chunk r of its input to rank r in the wire dtype; rank r sums the chunks it then
holds in fp32, in a fixed pairwise tree over the ranks. So the sum's bits depend neither on the
transport nor on the size of the buffer, and a bf16 wire costs rounding once per input, not at
every hop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

import torch

from .checks import (
    WIRE_DTYPES,
    group_rank,
    group_size,
    overlap,
    require_disjoint,
    require_flat,
    require_same_device,
    where,
)
from .handles import ReduceHandle, Statistics, launch
from .lanes import lane_of
from .record import issue
from .summation import sum_chunks
from .transport import Collection, Rest, exchange, host_bound

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["all_reduce_fp32", "reduce_scatter_fp32"]

Reduction = Literal["sum", "avg"]


def reduce_scatter_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: Reduction = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    scratch: torch.Tensor | None = None,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32 and keep this rank's piece.

    Args:
        output: flat [n]; float32 or `input`'s dtype. Rank r gets elements r*n .. (r+1)*n of the
            sum. It may be exactly this rank's own piece of `input` (in place), unless
            `accumulate` is set.
        input: flat [N*n] for N ranks; float32, bfloat16, float16 or float64: the wire dtype.
            It must not change until the handle's `wait`.
        group: the ranks, or None for a group of one.
        op: "sum", or "avg" to multiply the sum by 1/N.
        scale: a further factor; both are applied as one factor, rounded once to the dtype of the
            sum, to the sum and never to the input.
        accumulate: add to `output` (in the dtype of the sum) instead of overwriting it.
        async_op: return at once; the sum runs beside the caller, not in `wait`.
        scratch: flat, at least (N-1)*n elements of the wire dtype, for what other ranks send;
            allocated per call if None.

    Returns:
        A handle with `wait()`, `squared_norm` and `nonfinite` of the stored output.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    """
    name = "reduce_scatter_fp32"
    size, rank = group_size(group), group_rank(group)
    device = _check_reduction(name, output, input, group, op)
    if input.numel() != size * output.numel():
        raise ValueError(
            f"{name} {where(group)}: `input` has {input.numel()} elements, which is not the "
            f"{size} x {output.numel()} that {size} ranks with an output of {output.numel()} need; "
            f"pad the buffer to a multiple of the number of ranks"
        )
    own = input[rank * output.numel() : (rank + 1) * output.numel()]
    _check_aliasing(name, output, input, own, group, accumulate=accumulate)
    factor = _factor(op, scale, size, input.dtype)
    received = input.numel() - output.numel()
    call = issue(name, group, input.dtype, received * input.element_size(), async_op=async_op)
    statistics = Statistics(device)
    scratch = _scratch(name, scratch, received, input, output, group)
    pieces = list(input.chunk(size))

    def start() -> Rest:
        if group is None or size == 1:
            return lambda: sum_chunks([input], output, factor, accumulate, statistics)
        collection = Collection(pieces, group, device, scratch)

        def finish() -> None:
            sum_chunks(collection.arrive(), output, factor, accumulate, statistics)
            collection.release()

        return finish

    return cast(
        "ReduceHandle",
        launch(
            call,
            group,
            device,
            start,
            async_op=async_op,
            host_bound=host_bound(group, device),
            keep=(output, input, scratch),
            statistics=statistics,
        ),
    )


def all_reduce_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: Reduction = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32; every rank gets the whole sum.

    A reduce-scatter and a gather, so the bits are those of :func:`reduce_scatter_fp32`. Any
    number of elements: the last ranks' pieces may be shorter, or empty.

    Args:
        output: flat [n]; float32 or `input`'s dtype; it may be `input` itself, unless
            `accumulate` is set.
        input: flat [n] in the wire dtype.
        group: the ranks, or None for a group of one.
        op: as in :func:`reduce_scatter_fp32`.
        scale: as in :func:`reduce_scatter_fp32`.
        accumulate: add the sum to what this rank's `output` holds.
        async_op: return at once.

    Returns:
        A handle; its statistics are of this rank's piece of the output, so that their sum over
        the ranks is that of the whole.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    """
    name = "all_reduce_fp32"
    size, rank = group_size(group), group_rank(group)
    device = _check_reduction(name, output, input, group, op)
    if input.numel() != output.numel():
        raise ValueError(
            f"{name} {where(group)}: `output` has {output.numel()} elements and `input` "
            f"{input.numel()}; they must be equal"
        )
    _check_aliasing(name, output, input, input, group, accumulate=accumulate)
    factor = _factor(op, scale, size, input.dtype)
    piece = -(-input.numel() // size)
    sends = _cut(input, piece, size)
    target = torch.empty_like(output) if accumulate and size > 1 else output
    results = _cut(target, piece, size)
    mine = sends[rank].numel()
    scratch = _scratch(name, None, (size - 1) * mine, input, output, group)
    sent = (input.numel() - mine) * input.element_size()
    sent += (size - 1) * mine * output.element_size()
    call = issue(name, group, input.dtype, sent, async_op=async_op)
    statistics = Statistics(device)

    def start() -> Rest:
        if group is None or size == 1:
            return lambda: sum_chunks([input], output, factor, accumulate, statistics)
        collection = Collection(sends, group, device, scratch)
        second = lane_of(group).next_tag()  # now, not in `finish`: see `exchange`

        def finish() -> None:
            sum_chunks(collection.arrive(), results[rank], factor, False, statistics)
            collection.release()
            exchange(results, [results[rank]] * size, group, device, second)()
            if accumulate:
                finals = _cut(output, piece, size)
                for place in range(size):
                    kept = statistics if place == rank else None
                    sum_chunks([results[place]], finals[place], None, True, kept)

        return finish

    return cast(
        "ReduceHandle",
        launch(
            call,
            group,
            device,
            start,
            async_op=async_op,
            host_bound=host_bound(group, device),
            keep=(output, input, scratch, target),
            statistics=statistics,
        ),
    )


def _scratch(
    name: str,
    given: torch.Tensor | None,
    numel: int,
    input: torch.Tensor,
    output: torch.Tensor,
    group: ProcessGroup | None,
) -> torch.Tensor | None:
    """Scratch for `numel` received elements; None where the transport finds its own (CPU)."""
    if given is None:
        on_cpu = input.device.type == "cpu" and host_bound(group, input.device)
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


def _cut(tensor: torch.Tensor, piece: int, count: int) -> list[torch.Tensor]:
    """Cut into `count` runs of `piece` elements; the last ones may be shorter, or empty."""
    limit = tensor.numel()
    return [
        tensor[min(place * piece, limit) : min((place + 1) * piece, limit)]
        for place in range(count)
    ]


def _factor(op: str, scale: float | None, size: int, wire: torch.dtype) -> float | None:
    """The one factor of the sum, or None where it is one."""
    factor = 1.0 if scale is None else float(scale)
    if op == "avg":
        factor /= size
    if wire != torch.float64:
        factor = torch.tensor(factor, dtype=torch.float32).item()
    return None if factor == 1.0 else factor


def _check_reduction(
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    op: str,
) -> torch.device:
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
