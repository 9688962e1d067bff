"""The sum of a reduce-scatter: one function, the choice of its implementation, and the one on CPU.

On a CPU the sum goes block by block, so that every step after the first finds its data in cache.
One pass over memory does it all: the tree, the factor, the addition to the output, the cast, and
the squares for the norm. Figures: docs/decisions/0302-cpu-sums-in-blocks.md.

Note [Each rounding is an operation of its own]
All implementations give the same bits, because each does the same roundings in the same order. A
multiplication and an addition must not become one fused multiply-add, which rounds once instead of
twice. So `torch.add(alpha=)` and `addcmul`, which may contract, are not used here, and the Triton
kernel is compiled without contraction. See docs/decisions/0301-one-tree-one-factor.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lamina.collectives.call.collective import Statistics
from lamina.collectives.reduction.codec import Cast, Wire
from lamina.collectives.transport.chunked_messages import ChunkedMessage
from lamina.collectives.transport.gloo_exchange import Chunk
from lamina.collectives.transport.lanes import SumBuffers
from lamina.collectives.transport.peer_windows import PeerChunks

Chunks: TypeAlias = Sequence[Chunk] | torch.Tensor
"""Every rank's summands: one chunk per rank, or the rows of [ranks, items], which a sum overwrites.
"""

_BLOCK = 1 << 17  # elements per thread: larger blocks leave the cache, smaller ones cost calls
_MOST_THREADS = 16  # bounds the workspace: 16 MiB for the squares, 8 MiB per level of the tree
_STACKED = 1 << 23  # elements of all rows that a block of a stacked sum takes: no real CPU has one
_ROW = 1 << 12  # squares are summed in rows of fixed length: their order knows no thread count


def _tree(chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(chunks) == 1:
        return chunks[0]
    split = 1 << (len(chunks) - 1).bit_length() - 1
    return torch.add(_tree(chunks[:split]), _tree(chunks[split:]))


def reference_sum(
    chunks: Sequence[torch.Tensor],
    output: torch.Tensor,
    factor: float | None = None,
    accumulate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum `chunks` in the fixed pairwise tree into `output`, in float64 for float64, else float32.

    The definition: every rounding is one operation. Too slow and too hungry for training. The
    chunks, in rank order, have one dtype and `output`'s shape; `Epilogue` has the rest.

    Returns:
        Squared norm (float64) and non-finite flag of the stored output, both without dimensions.
    """
    dtype = torch.float64 if chunks[0].dtype == torch.float64 else torch.float32
    total = _tree([chunk.to(dtype) for chunk in chunks])
    if factor is not None:
        total = torch.mul(total, torch.tensor(factor, dtype=dtype, device=total.device))
    if accumulate:
        total = torch.add(output.to(dtype), total)
    output.copy_(total)
    stored = output.to(torch.float64)
    return stored.square().sum(), output.isfinite().all().logical_not()


def sum_rows(rows: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Sum the rows [ranks, n] in the fixed tree by as many operations as the tree has levels.

    Note [Rows are added where they lie]
    In each round every other row takes in its right neighbour, and the rows that are left are the
    sums of twice as many ranks. An odd row at the end waits for a later round. So the split is
    always at the largest power of two below the number of rows, which is the tree of `_tree`. The
    rows are overwritten, so that no memory is needed.

    The sum is in `into` where there are two rows or more, or else the first row.
    """
    step, count = 1, rows.shape[0]
    while step < count:
        left, right = rows[: count - step : 2 * step], rows[step :: 2 * step]
        if into is not None and 2 * step >= count:
            return torch.add(left[0], right[0], out=into)
        left.add_(right)
        step *= 2
    return rows[0]


@dataclass(frozen=True)
class Epilogue:
    """What becomes of a sum before it is stored.

    Attributes:
        factor: multiplies the sum, rounded to the dtype of the sum.
        accumulate: it is added to the output instead of overwriting it.
        statistics: filled in with those of the stored output; None leaves them out.
    """

    factor: float | None = None
    accumulate: bool = False
    statistics: Statistics | None = None


def sum_chunks(
    chunks: Chunks | PeerChunks,
    output: torch.Tensor,
    epilogue: Epilogue,
    wire: Wire,
    buffers: SumBuffers | None = None,
) -> None:
    """Sum `chunks`, of all ranks in rank order, into `output` in the fixed tree.

    `wire` says how chunks become summands. The implementation on CPU takes the buffers of an
    earlier sum.
    """
    if output.device.type == "meta":
        return
    if isinstance(chunks, torch.Tensor) and not wire.plain:
        chunks, wire = _decoded(chunks, wire, output.numel()), Wire(Cast(wire.sum_dtype))
    if output.device.type == "cpu" and not isinstance(chunks, PeerChunks):
        fused_sum(chunks, output, epilogue, wire, buffers)
        return
    if not isinstance(chunks, (torch.Tensor, PeerChunks)):  # one rank alone
        (alone,) = chunks
        assert isinstance(alone, torch.Tensor)  # noqa: S101 - on a GPU nothing else comes
        encoded = alone.view(1, -1)
        chunks = encoded if wire.plain else _decoded(encoded, wire, output.numel())
    factor, accumulate, statistics = epilogue.factor, epilogue.accumulate, epilogue.statistics
    if wire.sum_dtype != torch.float64 or isinstance(chunks, PeerChunks):
        filled = None if statistics is None else (statistics.squared_norm, statistics.nonfinite)
        _triton_sum()(chunks, output, factor, accumulate, filled)
        return
    # float64 on a GPU serves comparisons, not training: plain operations are fast enough.
    squared_norm, nonfinite = reference_sum([sum_rows(chunks)], output, factor, accumulate)
    if statistics is not None:
        statistics.squared_norm.copy_(squared_norm)
        statistics.nonfinite.copy_(nonfinite)


def _decoded(rows: torch.Tensor, wire: Wire, numel: int) -> torch.Tensor:
    """The summands of all rows of [ranks, items]: [ranks, numel]."""
    whole = -(-numel // wire.block) * wire.block
    values = rows.new_empty(len(rows), whole, dtype=wire.sum_dtype)
    for sender, row in enumerate(rows):
        wire.check(row, sender)
    wire.decode(rows.reshape(-1), values.view(-1))
    return values[:, :numel]


def _triton_sum() -> Callable[..., None]:
    """Import the kernel when it is first needed: CPU users need not have Triton."""
    try:
        from lamina.collectives.reduction.triton_sum import fused_sum as triton_fused_sum
    except ImportError as error:
        raise ImportError(
            "sums of gradients on a GPU need Triton, which could not be imported; install "
            "`lamina-collectives[triton]` (CUDA builds of torch bring it along)"
        ) from error
    return triton_fused_sum


def fused_sum(
    chunks: Chunks,
    output: torch.Tensor,
    epilogue: Epilogue,
    wire: Wire | None = None,
    buffers: SumBuffers | None = None,
) -> None:
    """Sum `chunks` on a CPU in the fixed tree into `output`.

    A chunk may be `output` itself, or lie in the memory of another process of this host, from
    which each block is read just before it is summed.
    """
    factor, accumulate, statistics = epilogue.factor, epilogue.accumulate, epilogue.statistics
    numel, wire = output.numel(), wire or Wire(Cast(chunks[0].dtype))
    sum_of = _BlockSum(chunks, wire, buffers or SumBuffers())
    block = sum_of.block
    rows = 0 if statistics is None else -(-numel // _ROW)
    squares = torch.zeros(rows, dtype=torch.float64, device="cpu")
    direct = not accumulate and output.dtype == wire.sum_dtype
    for chunk in () if isinstance(chunks, torch.Tensor) else chunks:
        # A sum must not overwrite a chunk that it still reads.
        if isinstance(chunk, torch.Tensor) and chunk.data_ptr() == output.data_ptr():
            direct = False
    # Block by block, through all steps: after the first one the block is in cache.
    for start in range(0, numel, block):
        target = output[start : start + block] if numel > block else output
        sum_of.start, sum_of.width = start, target.numel()
        into = target if direct else sum_of.level(0)
        total = sum_of.total(into)
        # One rounding each, in this order. See Note [Each rounding is an operation of its own].
        if total is not into:  # of one chunk, where it lies
            total = into.copy_(total)
        if factor is not None:
            total.mul_(factor)
        if accumulate and target.dtype == total.dtype:
            target.add_(total)
        elif accumulate:
            target.copy_(total.add_(target.to(total.dtype)))
        elif not direct:
            target.copy_(total)
        if statistics is not None:
            sum_of.squares(target, squares[start // _ROW :])
    if statistics is None:
        return
    # Sums of rows are added by themselves, so that the bits know no thread and no block.
    squared_norm = squares.sum()
    finite = math.isfinite(squared_norm.item())
    if not finite and output.dtype == torch.float64:
        # Squares of finite float64 values may overflow, those of float32 may not.
        finite = bool(output.isfinite().all())
    statistics.squared_norm.copy_(squared_norm)
    statistics.nonfinite.fill_(not finite)


class _BlockSum:
    """A sum of chunks, in blocks of `block` elements; `start` and `width` say which are at hand."""

    def __init__(self, chunks: Chunks, wire: Wire, buffers: SumBuffers) -> None:
        self.start = self.width = 0
        self._chunks, self._wire, self._buffers = chunks, wire, buffers
        if isinstance(chunks, torch.Tensor):  # whole rows of squares
            self.block = max(_STACKED // chunks.shape[0] // _ROW, 1) * _ROW
            return
        self.block = _BLOCK * min(torch.get_num_threads(), _MOST_THREADS)
        for chunk in chunks:
            if isinstance(chunk, ChunkedMessage):  # no block lies across two of its parts
                part = chunk.part_items // wire.unit * wire.block
                self.block = min(1 << self.block.bit_length() - 1, part)

    def level(self, index: int) -> torch.Tensor:
        """The block's buffer on one level of the tree."""
        return self._buffers.take(index, self.width, self._wire.sum_dtype)

    def total(self, into: torch.Tensor) -> torch.Tensor:
        """Sum the block at hand: into `into`, or one chunk's where it lies."""
        if isinstance(self._chunks, torch.Tensor):
            rows = self._chunks[:, self.start : self.start + self.width]
            return sum_rows(rows.to(self._wire.sum_dtype), into)
        return self._tree(range(len(self._chunks)), into)

    def _tree(self, ranks: range, into: torch.Tensor | None, depth: int = 1) -> torch.Tensor:
        """Sum the chunks of `ranks`; levels below `depth` are taken.

        The sum is in `into`, in a level where that is None, or is one chunk where it lies.
        """
        if len(ranks) == 1:
            return self._leaf(ranks[0], into, depth)
        if into is None:
            into, depth = self.level(depth), depth + 1
        # The largest power of two below the number of ranks: law 2's tree.
        split = 1 << (len(ranks) - 1).bit_length() - 1
        # The left half is summed where the whole will be; only the right one takes a level.
        first = self._tree(ranks[:split], into, depth)
        second = self._tree(ranks[split:], None, depth)
        return torch.add(first, second, out=into)

    def _leaf(self, rank: int, into: torch.Tensor | None, depth: int) -> torch.Tensor:
        """The summands of one chunk's block: where they lie, in `into`, or in a level."""
        assert not isinstance(self._chunks, torch.Tensor)  # noqa: S101 - `total` adds these
        chunk, wire = self._chunks[rank], self._wire
        # Blocks of the sum are whole blocks of the wire, but for the last one of a piece.
        start = self.start // wire.block * wire.unit
        width = -(-self.width // wire.block) * wire.unit
        if isinstance(chunk, torch.Tensor):
            block = chunk[start : start + width]
        elif isinstance(chunk, ChunkedMessage):
            block = chunk.window(start, width)
        elif wire.summable:
            into = self.level(depth) if into is None else into
            chunk.read(start, into)
            return into
        else:
            block = self._buffers.take("as it came", width, wire.dtype)
            chunk.read(start, block)
        if wire.summable:
            return block
        wire.check(block, rank)
        return wire.decode(block, self.level(depth) if into is None else into)

    def squares(self, block: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the sums of squares of each row of `block` to the beginning of `rows`."""
        count = -(-block.numel() // _ROW)
        wide = self._buffers.take("squares", count * _ROW, torch.float64)
        wide[: block.numel()].copy_(block)
        wide[block.numel() :].zero_()
        wide.mul_(wide)
        torch.sum(wide.view(count, _ROW), dim=1, out=rows[:count])
