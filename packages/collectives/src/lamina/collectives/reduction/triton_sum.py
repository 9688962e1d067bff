"""The sum on CUDA: one Triton kernel for the tree, the factor, the addition, the cast and the norm.

Bits equal the reference's: products and sums are compiled without contraction to fused
multiply-adds, and bfloat16 is rounded to nearest even. The squared norm is summed in float64; the
order within a block, and so its last bits, depend on the configuration that autotuning chose.
"""

import statistics as stats
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from lamina.collectives.compat import hold_stream
from lamina.collectives.reduction.triton_kernels import finish_kernel, segment_kernel, sum_kernel
from lamina.collectives.transport.peer_windows import PeerChunks, PeerRows

LEAVES = 32  # rows whose sum is unrolled; more go through float32 sums of segments


@dataclass(frozen=True)
class Config:
    """How a launch is cut: elements per block, blocks per program, warps per program."""

    block: int
    blocks: int
    warps: int

    @property
    def span(self) -> int:
        """Elements per program."""
        return self.block * self.blocks


CONFIGS = (
    Config(1024, 1, 4),
    Config(1024, 4, 4),
    Config(2048, 1, 4),
    Config(2048, 4, 8),
    Config(4096, 1, 8),
)
_DEFAULT = CONFIGS[0]
_SEGMENT_BLOCK = 1024  # elements per program of a segment's sum
_IN_REGISTERS = 256  # elements of all chunks for one thread: it has 255 registers of 32 bits
_TUNE_FROM = 1 << 20  # elements; smaller sums take microseconds, whatever the configuration
_TUNE_ON = 1 << 24  # elements: more than a cache holds, little enough to be a passing allocation
_CYCLES = 4_000_000  # of the GPU's clock: 2 ms, in which the host launches five kernels
_IN_KERNELS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_choices: dict[tuple[Any, ...], Config] = {}


def fused_sum(
    rows: torch.Tensor | PeerChunks,
    output: torch.Tensor,
    factor: float | None = None,
    accumulate: bool = False,
    statistics: tuple[torch.Tensor, torch.Tensor] | None = None,
    config: Config | None = None,
) -> None:
    """Sum the rows in the fixed tree into `output` on the current stream.

    One launch sums up to LEAVES rows. More take one launch before, whatever their number: it sums
    as many rows, a power of two, as leave at most LEAVES sums.

    Args:
        rows: [ranks, n], with a stride between rows; float32, bfloat16 or float16. `output` may be
            the only row. Rows in other ranks' memory come in slices, each with a launch.
        output: flat [n]; float32, bfloat16 or float16.
        factor: multiplies the sum; a float32 value.
        accumulate: add to `output`.
        statistics: filled with the squared norm (float64) and the non-finite flag (bool) of the
            stored output, both without dimensions; None leaves them out.
        config: left out, the fastest of CONFIGS is measured once per kind of sum, on a part of
            the data and beside the caller's buffers (never while a CUDA graph is captured).
    """
    if isinstance(rows, torch.Tensor):
        whole = _segment_sums(rows) if len(rows) > LEAVES else rows
        slices: Iterable[tuple[slice, torch.Tensor | PeerRows]] = [(slice(None), whole)]
    else:
        slices = rows.slices()
    partials, count = None, 0
    if statistics is not None:
        partials = _room_for_norms(output)
    for place, part in slices:
        target, kept = output[place], None if partials is None else partials[count:]
        count += triton.cdiv(
            target.numel(), _launch(part, target, factor, accumulate, kept, config)
        )
    if statistics is None:
        return
    squared_norm, nonfinite = statistics
    finish_kernel[(1,)](
        partials,
        squared_norm,
        nonfinite.view(torch.int8),
        count,
        BLOCK=2048,
        num_warps=8,
    )


def _room_for_norms(output: torch.Tensor) -> torch.Tensor:
    """Room for the partial norm that each program of a launch writes, of the most programs."""
    smallest = min(each.span for each in CONFIGS)
    most = triton.cdiv(output.numel(), smallest)
    return torch.empty(most, dtype=torch.float64, device=output.device)


def measured_choices() -> dict[tuple[Any, ...], Config]:
    """What autotuning chose so far: by device, ranks, wire and output dtype, accumulate, norm."""
    return dict(_choices)


def _segment_sums(rows: torch.Tensor) -> torch.Tensor:
    """Sums in float32 of at most LEAVES segments of rows, each a subtree of the whole tree."""
    ranks, numel = rows.shape
    # The fewest segments of a power of two rows each that leave at most LEAVES sums.
    runs = 1 << max(-(-ranks // LEAVES**2) - 1, 0).bit_length()
    segments, depth = -(-ranks // (LEAVES * runs)), runs.bit_length()
    sums = rows.new_empty(segments, depth, numel, dtype=torch.float32)
    if numel:
        segment_kernel[(triton.cdiv(numel, _SEGMENT_BLOCK), segments)](
            rows,
            rows.stride(0),
            sums,
            numel,
            ranks,
            runs,
            depth,
            LEAVES=LEAVES,
            BLOCK=_SEGMENT_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return sums[:, 0]


def _launch(
    rows: torch.Tensor | PeerRows,
    output: torch.Tensor,
    factor: float | None,
    accumulate: bool,
    partials: torch.Tensor | None,
    config: Config | None,
) -> int:
    """Launch the kernel; return how many elements each of its programs took."""
    if isinstance(rows, PeerRows):  # nothing is measured, as that would take all ranks
        config, given, stride = config or _DEFAULT, rows.addresses, rows.start
        wire = _IN_KERNELS[rows.dtype]
    else:
        config = config or _choose(rows, output, accumulate, partials is not None)
        given, stride, wire = rows, rows.stride(0), None
    if output.numel():
        sum_kernel[(triton.cdiv(output.numel(), config.span),)](
            given,
            stride,
            output,
            output if partials is None else partials,
            output.numel(),
            1.0 if factor is None else factor,
            COUNT=len(rows),
            SCALED=factor is not None,
            ACCUMULATE=accumulate,
            NORM=partials is not None,
            BLOCK=config.block,
            BLOCKS=config.blocks,
            WIRE=wire,
            num_warps=config.warps,
            enable_fp_fusion=False,
        )
    return config.span


def _choose(rows: torch.Tensor, output: torch.Tensor, accumulate: bool, norm: bool) -> Config:
    kind = (output.device, len(rows), rows.dtype, output.dtype, accumulate, norm)
    if kind in _choices:
        return _choices[kind]
    if output.numel() < _TUNE_FROM or not output.is_cuda:
        return _DEFAULT
    if torch.cuda.is_current_stream_capturing():  # a graph would replay the measurement
        return _DEFAULT
    # Beside the caller's output: a trial with `accumulate` would add to it.
    length = min(output.numel(), _TUNE_ON)
    inputs, target = rows[:, :length], torch.zeros_like(output[:length])
    partials = _room_for_norms(target) if norm else None
    times = {
        config: _time(partial(_launch, inputs, target, None, accumulate, partials, config))
        for config in configs_for(len(rows))
    }
    _choices[kind] = min(times, key=times.__getitem__)
    return _choices[kind]


def configs_for(ranks: int) -> tuple[Config, ...]:
    """Return the configurations whose threads keep a block of every chunk in registers.

    A compiler may order loads so that more fits (Triton 3.7 does, 3.9 spills), but need not.
    """
    return tuple(c for c in CONFIGS if ranks * c.block <= _IN_REGISTERS * 32 * c.warps)


def _time(run: Callable[[], object]) -> float:
    """Median milliseconds on the current stream, after a first run that compiles."""
    run()
    spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    # A launch takes the host longer than the kernel takes the GPU. While the stream is held, the
    # host queues all of them, and what lies between two events is the kernel alone.
    hold_stream(_CYCLES)
    for _ in range(5):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        spans.append((begin, end))
    torch.cuda.current_stream().synchronize()
    return stats.median(float(begin.elapsed_time(end)) for begin, end in spans)
