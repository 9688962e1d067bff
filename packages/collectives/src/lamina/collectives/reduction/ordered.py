"""Reductions: what all of them check and how they start, and those with one order of summation.

`Reduction` knows all that ordered and native reductions have in common, and a subclass says how the
ranks' inputs become a sum. `OrderedReduction` sends chunk r of every rank's input to rank r in the
wire dtype; rank r sums the chunks it then holds in fp32, in a fixed pairwise tree over the ranks.
So the sum's bits depend neither on the transport nor on the size of the buffer, and a bf16 wire
costs rounding once per input, not at every hop.
"""

import ctypes
from abc import abstractmethod
from functools import partial
from typing import ClassVar, Literal, TypeAlias

import torch
from torch.distributed import ProcessGroup

from lamina.collectives.call.checks import (
    WIRE_DTYPES,
    require_agreement,
    require_disjoint,
    require_flat,
    require_same_device,
)
from lamina.collectives.call.collective import Collective, ReduceHandle, Statistics, launch
from lamina.collectives.call.record import issue
from lamina.collectives.reduction.codec import Cast, GradientCodec, Wire
from lamina.collectives.reduction.summation import Epilogue, sum_chunks
from lamina.collectives.transport.gloo_exchange import bounds_of
from lamina.collectives.transport.groups import served_by_gloo, where
from lamina.collectives.transport.lanes import lane_of
from lamina.collectives.transport.transport import Chunks, Completion, route_for

__all__ = [
    "OrderedReduction",
    "Reduction",
    "SumOp",
    "all_reduce_fp32",
    "reduce_scatter_fp32",
]

SumOp: TypeAlias = Literal["sum", "avg"]
"""What a reduction makes of the terms; who adds them is the class of the reduction."""

Memory: TypeAlias = tuple[torch.Tensor | None, ...]
"""Tensors that a reduction needs besides its output and input, until it has ended."""


class Reduction(Collective):
    """A sum over ranks, prepared once and started often.

    Args:
        output: a buffer of the kind that takes the sum: flat, float32 or the dtype of `input`.
        input: a buffer of the kind that is summed: flat, in float32, bfloat16, float16 or float64.
        group: the ranks, or None for a group of one.
        scatter: keep this rank's piece of the sum, an N-th of `input`; else the whole.
        op: "sum", or "avg" to divide by the number of ranks.
        codec: how gradients become what travels; a cast to the dtype of `input` (none) if None.

    Raises:
        ValueError: op, codec, dtypes, sizes, strides or devices that don't fit.
    """

    suffix: ClassVar[str]
    """Of the public functions' names."""
    piecewise: ClassVar[bool]
    """Whether the statistics of an all-reduce are of this rank's piece, not of the whole."""
    overlap_hint = (
        "only an output of the same dtype that is exactly this rank's own piece of the input may, "
        "and only without accumulate"
    )

    def __init__(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        group: ProcessGroup | None,
        *,
        scatter: bool,
        op: SumOp = "sum",
        codec: GradientCodec | None = None,
    ) -> None:
        name = f"{'reduce_scatter' if scatter else 'all_reduce'}_{self.suffix}"
        if op not in ("sum", "avg"):
            raise ValueError(f"{name} {where(group)}: op must be 'sum' or 'avg', not {op!r}")
        super().__init__(name, output, input, group)
        self.scatter, self.sum_op = scatter, op
        if input.dtype not in WIRE_DTYPES:
            raise ValueError(
                f"{name} {where(group)}: `input` is {input.dtype}; the wire dtype must be one of "
                f"{', '.join(map(str, WIRE_DTYPES))}"
            )
        if output.dtype not in (torch.float32, input.dtype):
            raise ValueError(
                f"{name} {where(group)}: `output` is {output.dtype}; it must be torch.float32 or "
                f"the wire dtype {input.dtype}"
            )
        self._require_sizes(output.numel(), input.numel())
        self._numel = input.numel()
        self._piece = output.numel() if scatter else -(-self._numel // self.size)
        self._prepare(codec)

    @abstractmethod
    def _prepare(self, codec: GradientCodec | None) -> None:
        """Find out what is the same for all starts: the wire, the bytes, the way."""

    def _require_sizes(self, output: int, input: int) -> None:
        if self.scatter and input != self.size * output:
            raise ValueError(
                f"{self.op} {where(self.group)}: `input` has {input} elements, which is not the "
                f"{self.size} x {output} that {self.size} ranks with an output of {output} need; "
                f"pad the buffer to a multiple of the number of ranks"
            )
        if not self.scatter and input != output:
            raise ValueError(
                f"{self.op} {where(self.group)}: `output` has {output} elements and `input` "
                f"{input}; they must be equal"
            )

    def _may_overlap(self, output: torch.Tensor, input: torch.Tensor) -> bool:
        first = self.rank * output.nbytes if self.scatter else 0
        return output.dtype == input.dtype and output.data_ptr() == input.data_ptr() + first

    @abstractmethod
    def _memory(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        accumulate: bool,
        scratch: torch.Tensor | None,
    ) -> Memory:
        """Find the memory that this reduction needs besides; on the caller's stream."""

    @abstractmethod
    def _reduce(self, output: torch.Tensor, memory: Memory, epilogue: Epilogue) -> Completion:
        """Post the messages; return what is left to do."""

    def _bytes(self, accumulate: bool) -> int:
        """Bytes that this rank sends."""
        return self._sent

    def start(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        scale: float | None = None,
        accumulate: bool = False,
        scratch: torch.Tensor | None = None,
        statistics: bool = True,
        async_op: bool = True,
    ) -> ReduceHandle:
        """Sum `input` over the ranks into `output`.

        Args:
            output: of the kind that was prepared for.
            input: likewise; unchanged until the handle's `wait`.
            scale: see `reduce_scatter_fp32`, as for all that follow.
            accumulate: add to `output`.
            scratch: memory for what other ranks send.
            statistics: find the squared norm and the non-finite flag.
            async_op: return at once.

        Raises:
            ValueError: buffers of another kind, or that share memory.
        """
        output, input = output.detach(), input.detach()
        self._require_buffers(output, input, in_place=not accumulate)
        memory = self._memory(output, input, accumulate, scratch)
        factor = None if scale is None and self.sum_op == "sum" else self._factor(scale)
        kept = Statistics(self.device) if statistics else None
        sent = self._bytes(accumulate)
        call = issue(self.op, self.group, self._wire_dtype, sent, async_op=async_op)
        return launch(
            ReduceHandle(call, (output, input, *memory), kept),
            self.group,
            self.device,
            partial(self._reduce, output, memory, Epilogue(factor, accumulate, kept)),
            async_op=async_op,
        )

    def _factor(self, scale: float | None) -> float | None:
        """The one factor of the sum, or None where it is one."""
        factor = 1.0 if scale is None else float(scale)
        if self.sum_op == "avg":
            factor /= self.size
        if self._kinds[1][0] != torch.float64:
            factor = ctypes.c_float(factor).value  # to the nearest, as C converts
        return None if factor == 1.0 else factor


class OrderedReduction(Reduction):
    """Chunks travel to the rank that sums them in fp32, in a fixed pairwise tree over the ranks."""

    suffix = "fp32"
    piecewise = True

    def _prepare(self, codec: GradientCodec | None) -> None:
        group = self.group
        wire = self._wire = Wire(codec or Cast(self._wire_dtype))
        self._sends_input = wire.plain and wire.dtype == self._wire_dtype
        self._wire_dtype, device = wire.dtype, self.device
        # Backends know only equal pieces.
        needs_even = device.type != "meta" and not served_by_gloo(group, device)
        self._padded = self._piece * self.size if needs_even else self._numel
        self._own = bounds_of(self.rank, self._piece, self._padded)
        mine = self._own[1] - self._own[0]
        full, rest = divmod(self._padded, max(self._piece, 1))
        self._wire_total = full * wire.items(self._piece) + wire.items(rest)
        self._wire_piece = wire.items(self._piece)
        self._sent = (self._wire_total - wire.items(mine)) * wire.dtype.itemsize
        self._gathered = 0 if self.scatter else (self.size - 1) * mine
        self._route = route_for(group, self._wire_piece, self._wire_total, device, wire.unit)
        self._gather = route_for(group, self._piece, self._padded, device)
        pieces = self.size if self._route.needs_scratch else self.size - 1
        self._scratch = pieces * wire.items(mine)
        self._lane = None if group is None or self.size == 1 else lane_of(group)

    def _bytes(self, accumulate: bool) -> int:
        gathered_in = self._wire.sum_dtype if accumulate else self._kinds[0][0]
        return self._sent + self._gathered * gathered_in.itemsize

    def _memory(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        accumulate: bool,
        scratch: torch.Tensor | None,
    ) -> Memory:
        """What is sent, before and after the codec; room for what comes; what is gathered into."""
        source, target = input, output
        if self._padded != self._numel:
            source = input.new_zeros(self._padded)
            source[: self._numel].copy_(input)
        sent = source
        if not self._sends_input:
            sent = torch.empty(self._wire_total, dtype=self._wire.dtype, device=self.device)
        if scratch is not None:
            self._require_scratch(scratch, output, input)
        elif self._route.needs_scratch:
            scratch = torch.empty(self._scratch, dtype=self._wire.dtype, device=self.device)
        gathers = not self.scatter and self.size > 1
        if gathers and (accumulate or self._padded != self._numel):
            # To accumulate, the sums are gathered apart, as ranks may hold different outputs.
            dtype = self._wire.sum_dtype if accumulate else output.dtype
            target = torch.empty(self._padded, dtype=dtype, device=self.device)
        return source, sent, scratch, target

    def _require_scratch(
        self, scratch: torch.Tensor, output: torch.Tensor, input: torch.Tensor
    ) -> None:
        name, group, numel = self.op, self.group, self._scratch
        require_flat(name, "scratch", scratch, group)
        require_same_device(name, group, input=input, scratch=scratch)
        if scratch.dtype != self._wire.dtype or scratch.numel() < numel:
            raise ValueError(
                f"{name} {where(group)}: `scratch` has {scratch.numel()} elements of "
                f"{scratch.dtype}; it needs at least {numel} of the wire dtype {self._wire.dtype}"
            )
        require_disjoint(name, group, ("scratch", scratch), ("input", input))
        require_disjoint(name, group, ("scratch", scratch), ("output", output))

    def _reduce(self, output: torch.Tensor, memory: Memory, epilogue: Epilogue) -> Completion:
        source, sent, scratch, target = memory
        assert source is not None and sent is not None and target is not None  # noqa: S101, PT018
        if sent is not source and not source.is_meta:
            self._wire.encode(source, sent, self._piece)
        chunks = self._route.collect(sent, scratch)
        if self.scatter or self._lane is None:
            return partial(self._sum, chunks, output, epilogue)
        tag = self._lane.next_tag()  # see Note [Tags are drawn when a collective is called]
        return partial(self._sum_and_gather, chunks, target, tag, output, epilogue)

    def _sum(self, chunks: Chunks, output: torch.Tensor, epilogue: Epilogue) -> None:
        """Wait for all chunks and sum them; afterwards all ranks may reuse their inputs."""
        if self._lane is None:
            sum_chunks(chunks.chunks(), output, epilogue, self._wire)
        else:
            buffers = self._lane.scratch_pool.borrow_sum_buffers()
            sum_chunks(chunks.chunks(), output, epilogue, self._wire, buffers)
            self._lane.scratch_pool.give_back_sum_buffers(buffers)
        chunks.close()

    def _sum_and_gather(
        self,
        chunks: Chunks,
        target: torch.Tensor,
        tag: int,
        output: torch.Tensor,
        epilogue: Epilogue,
    ) -> None:
        start, stop = self._own
        own, statistics = target[start:stop], epilogue.statistics
        first = Epilogue(epilogue.factor, False, None if epilogue.accumulate else statistics)
        self._sum(chunks, own, first)
        self._gather.gather(target, own, tag)()
        if epilogue.accumulate:
            cast = Wire(Cast(self._wire.sum_dtype))
            for begin, end in ((0, start), (start, stop), (stop, self._numel)):
                place = slice(begin, min(end, self._numel))
                kept = statistics if begin == start else None
                sum_chunks([target[place]], output[place], Epilogue(None, True, kept), cast)
        elif target is not output:  # padded
            output.copy_(target[: self._numel])

    def agree(self) -> None:
        """Compare this call over the ranks; collective.

        Raises:
            ValueError: on every rank, if any two differ.
        """
        (_, output), (dtype, input) = self._kinds
        require_agreement(self.op, self.group, self.device, wire=dtype, output=output, input=input)


def reduce_scatter_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    scratch: torch.Tensor | None = None,
    statistics: bool = True,
    check: bool = False,
    codec: GradientCodec | None = None,
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
        scratch: flat, of the wire dtype, for what other ranks send: at least (N-1)*n elements, and
            N*n where a backend other than gloo fills it; Lamina's own if None.
        statistics: False leaves out squared norm and non-finite flag, which cost a little time.
        check: compare this call over the ranks first (for debugging; on all ranks or on none).
        codec: how `input` becomes what travels, the same on all ranks; None sends it as it is.

    Returns:
        A handle with `wait()`, `squared_norm` and `nonfinite` of the stored output.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> gradients, shard = torch.ones(4, dtype=torch.bfloat16), torch.empty(4)
        >>> reduce_scatter_fp32(shard, gradients, None, op="avg").squared_norm.item()
        4.0
    """
    reduction = OrderedReduction(output, input, group, scatter=True, op=op, codec=codec)
    if check:
        reduction.agree()
    return reduction.start(
        output,
        input,
        scale=scale,
        accumulate=accumulate,
        scratch=scratch,
        statistics=statistics,
        async_op=async_op,
    )


def all_reduce_fp32(
    output: torch.Tensor,
    input: torch.Tensor,
    group: ProcessGroup | None,
    *,
    op: SumOp = "sum",
    scale: float | None = None,
    accumulate: bool = False,
    async_op: bool = False,
    statistics: bool = True,
    check: bool = False,
    codec: GradientCodec | None = None,
) -> ReduceHandle:
    """Sum `input` over the ranks of `group` in fp32; every rank gets the whole sum.

    A reduce-scatter and a gather, so the bits are those of `reduce_scatter_fp32`. Any
    number of elements: the last ranks' pieces may be shorter, or empty.

    Args:
        output: flat [n]; float32 or `input`'s dtype; it may be `input` itself, unless
            `accumulate` is set.
        input: flat [n] in the wire dtype.
        group: the ranks, or None for a group of one.
        op: as in `reduce_scatter_fp32`.
        scale: as in `reduce_scatter_fp32`.
        accumulate: add the sum to what this rank's `output` holds.
        async_op: return at once.
        statistics: as in `reduce_scatter_fp32`.
        check: as in `reduce_scatter_fp32`.
        codec: as in `reduce_scatter_fp32`. The sums are gathered as they are.

    Returns:
        A handle; its statistics are of this rank's piece of the output, so that their sum over
        the ranks is that of the whole.

    Raises:
        ValueError: sizes, dtypes, devices, strides or shared memory that don't fit.

    Examples:
        >>> norms = torch.ones(4)
        >>> all_reduce_fp32(norms, norms, None).wait()
    """
    reduction = OrderedReduction(output, input, group, scatter=False, op=op, codec=codec)
    if check:
        reduction.agree()
    return reduction.start(
        output, input, scale=scale, accumulate=accumulate, statistics=statistics, async_op=async_op
    )
