"""The Triton kernels of the sum; `triton_sum` launches them.

Products and sums must be compiled with `enable_fp_fusion=False`: a fused multiply-add rounds once
where the reference rounds twice.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803, N806

import triton
import triton.language as tl


@triton.jit
def _tree(
    rows, stride, offsets, mask, FIRST: tl.constexpr, COUNT: tl.constexpr, WIRE: tl.constexpr
):
    """Pairwise sum of rows FIRST .. FIRST + COUNT, unrolled while compiling.

    With a dtype WIRE the rows lie in other ranks' memory: `rows` has the addresses of their blocks,
    and `stride` is the number of elements from there to each row.
    """
    SPLIT: tl.constexpr = (
        16 if COUNT > 16 else (8 if COUNT > 8 else (4 if COUNT > 4 else (2 if COUNT > 2 else 1)))
    )
    if COUNT == 1:
        if WIRE is None:
            row = rows + FIRST * stride
        else:
            block = tl.load(rows + FIRST).to(tl.pointer_type(WIRE), bitcast=True)
            row = tl.multiple_of(block, 16) + stride
        total = tl.load(row + offsets, mask=mask, other=0.0).to(tl.float32)
    else:
        left = _tree(rows, stride, offsets, mask, FIRST, SPLIT, WIRE)
        right = _tree(rows, stride, offsets, mask, FIRST + SPLIT, COUNT - SPLIT, WIRE)
        total = left + right
    return total


@triton.jit
def _round_to_bfloat16(value):
    """Nearest even, by integer arithmetic: the interpreter's own cast truncates."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _masked_tree(rows, stride, offsets, mask, first, end, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The same of COUNT rows, a power of two; those from `end` on are -0.0, which adds nothing."""
    if COUNT == 1:
        # A block, as masks are: Triton 3.9's interpreter takes no scalar for a part of a mask.
        there = first + FIRST + tl.zeros_like(offsets) < end
        place = rows + (first + FIRST) * stride + offsets
        value = tl.load(place, mask=mask & there, other=0.0).to(tl.float32)
        # Not `other=-0.0`, which Triton takes for 0.0: that would turn a sum of -0.0 into 0.0.
        nothing = tl.full(value.shape, -0x80000000, tl.int32).to(tl.float32, bitcast=True)
        total = tl.where(there, value, nothing)
    else:
        HALF: tl.constexpr = COUNT // 2
        left = _masked_tree(rows, stride, offsets, mask, first, end, FIRST, HALF)
        right = _masked_tree(rows, stride, offsets, mask, first, end, FIRST + HALF, HALF)
        total = left + right
    return total


@triton.jit
def segment_kernel(
    rows, stride, sums, numel, count, runs, depth, LEAVES: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum segments of `runs` x LEAVES rows, both powers of two: program (block, segment).

    The sums of runs are carried as in a binary counter: two sums of equally many runs become one.
    At most `depth` wait at a time, in the segment's rows of `sums`; the first row ends as the sum.
    """
    segment = tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    waiting = sums + segment * depth * numel + offsets
    kept, run = 0, 0
    while run < runs:
        first = (segment * runs + run) * LEAVES
        total = _masked_tree(rows, stride, offsets, mask, first, count, 0, LEAVES)
        left = run
        while left % 2 == 1:
            kept -= 1
            total = tl.load(waiting + kept * numel, mask=mask, other=0.0) + total
            left = left // 2
        tl.store(waiting + kept * numel, total, mask=mask)
        tl.debug_barrier()  # other threads of the program may load what this one stores
        kept += 1
        run += 1


def _traffic(grid, metadata, arguments):
    """What a sum reads and writes, for Triton's profiler and for the virtual GPU's clock."""
    output, wire = arguments["output"], arguments["WIRE"]
    width = arguments["rows"].element_size() if wire is None else wire.primitive_bitwidth // 8
    moved = arguments["COUNT"] * width + (1 + arguments["ACCUMULATE"]) * output.element_size()
    return {"name": metadata.name, "bytes": arguments["numel"] * moved}


@triton.jit(launch_metadata=_traffic)
def sum_kernel(
    rows,
    stride: tl.int64,  # or Triton would multiply what fits into 32 bits in 32
    output,
    partials,
    numel,
    factor,
    COUNT: tl.constexpr,
    SCALED: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIRE: tl.constexpr = None,
):
    """Each program sums BLOCKS blocks of BLOCK elements of COUNT rows, and keeps their squares."""
    program = tl.program_id(0)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    for step in range(BLOCKS):
        offsets = (program.to(tl.int64) * BLOCKS + step) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < numel
        total = _tree(rows, stride, offsets, mask, 0, COUNT, WIRE)
        if SCALED:
            total = total * factor
        if ACCUMULATE:
            total = tl.load(output + offsets, mask=mask, other=0.0).to(tl.float32) + total
        if output.dtype.element_ty == tl.bfloat16:
            stored = _round_to_bfloat16(total)
        else:
            stored = total.to(output.dtype.element_ty)
        tl.store(output + offsets, stored, mask=mask)
        if NORM:
            # What lies beyond the end is loaded as zero, so it adds nothing. With a mask here ptxas
            # runs out of registers for sm_90.
            wide = stored.to(tl.float32).to(tl.float64)
            squares += wide * wide
    if NORM:
        tl.store(partials + program, tl.sum(squares, axis=0))


@triton.jit
def finish_kernel(partials, squared_norm, nonfinite, count, BLOCK: tl.constexpr):
    """One program: sum the partial sums in a fixed order; see whether the result is finite."""
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    start = 0
    while start < count:  # not range(count): the interpreter of triton 3.6 fails on it
        offsets = start + tl.arange(0, BLOCK)
        total += tl.load(partials + offsets, mask=offsets < count, other=0.0)
        start += BLOCK
    norm = tl.sum(total, axis=0)
    tl.store(squared_norm, norm)
    # Squares of finite float32 values fit into float64, so only infinities and NaNs get here.
    finite = (norm == norm) & (norm < float("inf"))
    tl.store(nonfinite, tl.where(finite, 0, 1).to(tl.int8))
