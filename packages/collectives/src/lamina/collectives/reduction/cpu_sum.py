"""The sum on CPU: block by block, so that every step after the first finds its data in cache.

One pass over memory does it all: the tree, the factor, the addition to the output, the cast, and
the squares for the norm. Plain torch operations on blocks are used because they are vectorised,
release the interpreter lock and round like the reference; `torch.add(alpha=)` and `addcmul` may
contract to a fused multiply-add and are avoided. Figures: docs/decisions/0302.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lamina.collectives.reduction.reference import sum_dtype
from lamina.collectives.transport.chunked_messages import ChunkedMessage
from lamina.collectives.transport.gloo_exchange import Chunk
from lamina.collectives.transport.scratch_pool import SumBuffers

__all__ = ["fused_sum"]

_BLOCK = 1 << 17  # elements per thread: larger blocks leave the cache, smaller ones cost calls
_MOST_THREADS = 16  # bounds the workspace: 16 MiB for the squares, 8 MiB per level of the tree
_ROW = 1 << 12  # squares are summed in rows of fixed length: their order knows no thread count


def fused_sum(
    chunks: Sequence[Chunk],
    output: torch.Tensor,
    factor: float | None = None,
    accumulate: bool = False,
    statistics: bool = True,
    buffers: SumBuffers | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sum `chunks` in the fixed tree into `output`; arguments as in `reference_sum`.

    A chunk may be `output` itself, or lie in the memory of another process of this host, from
    which each block is read just before it is summed. `statistics=False` leaves out the norm and
    returns None. `buffers` kept from an earlier sum save the page faults of new ones.
    """
    block = _block(chunks)
    numel = output.numel()
    work = _BlockSum(chunks, min(block, numel), buffers or SumBuffers())
    squares = torch.zeros(-(-numel // _ROW) if statistics else 0, dtype=torch.float64, device="cpu")
    direct = not accumulate and output.dtype == work.dtype and not _among(output, chunks)
    for start in range(0, numel, block):
        target = output[start : start + block] if numel > block else output
        work.start, work.width = start, target.numel()
        total = work.tree(range(len(chunks)), target if direct else work.level(0))
        if factor is not None:
            total.mul_(factor)
        if accumulate:
            _accumulate(target, total)
        elif not direct:
            target.copy_(total)
        if statistics:
            work.squares(target, squares[start // _ROW :])
    if not statistics:
        return None
    squared_norm = squares.sum()
    finite = math.isfinite(squared_norm.item())
    if not finite and output.dtype == torch.float64:
        # Squares of finite float64 values may overflow, those of float32 may not.
        finite = bool(output.isfinite().all())
    return squared_norm, torch.tensor(not finite, device="cpu")


def _block(chunks: Sequence[Chunk]) -> int:
    block = _BLOCK * min(torch.get_num_threads(), _MOST_THREADS)
    for chunk in chunks:
        if isinstance(chunk, ChunkedMessage):  # no block may lie across two of its parts
            block = min(1 << block.bit_length() - 1, chunk.part_numel)
    return block


def _among(output: torch.Tensor, chunks: Sequence[Chunk]) -> bool:
    return any(
        isinstance(chunk, torch.Tensor) and chunk.data_ptr() == output.data_ptr()
        for chunk in chunks
    )


def _accumulate(target: torch.Tensor, total: torch.Tensor) -> None:
    if target.dtype == total.dtype:
        target.add_(total)
    else:
        target.copy_(total.add_(target.to(total.dtype)))


class _BlockSum:
    """A sum of chunks, block by block; `start` and `width` say which elements are at hand."""

    def __init__(self, chunks: Sequence[Chunk], length: int, buffers: SumBuffers) -> None:
        self.start = self.width = 0
        self.dtype = sum_dtype(chunks[0].dtype)
        self._chunks, self._buffers = chunks, buffers
        buffers.fit(length, chunks[0].dtype, self.dtype)

    def level(self, index: int) -> torch.Tensor:
        """The block's buffer on one level of the tree."""
        return self._buffers.level(index)[: self.width]

    def tree(self, ranks: range, into: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Write the sum of the chunks of `ranks` to `into`; levels below `depth` are taken."""
        if len(ranks) == 1:
            block = self._leaf(ranks[0], into, depth)
            return into if block is into else into.copy_(block)
        split = 1 << (len(ranks) - 1).bit_length() - 1
        first = self._part(ranks[:split], into, depth)
        second = self._part(ranks[split:], None, depth)
        return torch.add(first, second, out=into)

    def _part(self, ranks: range, into: torch.Tensor | None, depth: int) -> torch.Tensor:
        """The sum of a subtree: in `into`, in a level, or the chunk itself if it needs no cast."""
        if len(ranks) == 1:
            return self._leaf(ranks[0], into, depth)
        if into is None:
            return self.tree(ranks, self.level(depth), depth + 1)
        return self.tree(ranks, into, depth)

    def _leaf(self, rank: int, into: torch.Tensor | None, depth: int) -> torch.Tensor:
        """One chunk's block in the dtype of the sum: where it lies, in `into`, or in a level."""
        chunk = self._chunks[rank]
        needs_cast = chunk.dtype != self.dtype
        if isinstance(chunk, torch.Tensor):
            block = chunk[self.start : self.start + self.width]
        elif isinstance(chunk, ChunkedMessage):
            block = chunk.window(self.start, self.width)
        else:
            block = self._buffers.raw()[: self.width] if needs_cast else self._target(into, depth)
            chunk.read(self.start, block)
        return self._target(into, depth).copy_(block) if needs_cast else block

    def _target(self, into: torch.Tensor | None, depth: int) -> torch.Tensor:
        return self.level(depth) if into is None else into

    def squares(self, block: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the sums of squares of each row of `block` to the beginning of `rows`."""
        count = -(-block.numel() // _ROW)
        wide = self._buffers.squares(_ROW)[: count * _ROW]
        wide[: block.numel()].copy_(block)
        wide[block.numel() :].zero_()
        wide.mul_(wide)
        torch.sum(wide.view(count, _ROW), dim=1, out=rows[:count])
