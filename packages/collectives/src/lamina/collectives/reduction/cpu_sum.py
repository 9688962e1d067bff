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
from lamina.collectives.transport.chunked_messages import MessageRun
from lamina.collectives.transport.shared_host import Chunk, RemoteRun

__all__ = ["Workspace", "fused_sum", "lasting"]

_BLOCK = 1 << 17  # elements per thread: larger blocks leave the cache, smaller ones cost calls
_MOST_THREADS = 16  # bounds the workspace: 16 MiB for the squares, 8 MiB per level of the tree
_ROW = 1 << 12  # squares are summed in rows of fixed length: their order knows no thread count


def fused_sum(
    chunks: Sequence[Chunk],
    output: torch.Tensor,
    factor: float | None = None,
    accumulate: bool = False,
    statistics: bool = True,
    workspace: Workspace | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Sum `chunks` in the fixed tree into `output`; arguments as in `reference_sum`.

    A chunk may be `output` itself, or lie in a neighbour's memory, whence each block is read just
    before it is summed. `statistics=False` leaves out the norm and returns None. A `workspace`
    kept from an earlier sum saves the page faults of a new one.
    """
    block = _block(chunks)
    numel = output.numel()
    work = workspace or Workspace()
    work.open(chunks, min(block, numel))
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
    work.close()
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
        if isinstance(chunk, MessageRun):  # no block may straddle two of its parts
            block = min(1 << block.bit_length() - 1, chunk.granule)
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


def lasting(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that outlives a call. No inference tensor: later calls could not write to it."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device="cpu")


class Workspace:
    """Buffers of a block's size: one per level of the tree, one for squares, one for raw chunks.

    Used by one sum at a time; a sum at hand works on the `width` elements from `start`.
    """

    def __init__(self) -> None:
        self.start = self.width = self._length = 0
        self.dtype = self._wire = torch.float32
        self._chunks: Sequence[Chunk] = ()
        self._levels: list[torch.Tensor] = []
        self._raw: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    def open(self, chunks: Sequence[Chunk], length: int) -> None:
        """Get ready to sum `chunks` in blocks of at most `length` elements."""
        wire = chunks[0].dtype
        if length > self._length or wire != self._wire:
            self._length, self._wire, self.dtype = length, wire, sum_dtype(wire)
            self._levels, self._raw, self._squares = [], None, None
        self._chunks = chunks

    def close(self) -> None:
        """Let go of the chunks."""
        self._chunks = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its buffers."""
        buffers = (*self._levels, self._raw, self._squares)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def level(self, index: int) -> torch.Tensor:
        """Buffer of one level of the tree."""
        while len(self._levels) <= index:
            self._levels.append(lasting(self._length, self.dtype))
        return self._levels[index][: self.width]

    def tree(self, ranks: range, into: torch.Tensor, depth: int = 1) -> torch.Tensor:
        """Write the sum of the chunks of `ranks` to `into`; levels below `depth` are taken."""
        if len(ranks) == 1:
            self._load(ranks[0], into)
            return into
        split = 1 << (len(ranks) - 1).bit_length() - 1
        first = self._part(ranks[:split], into, depth)
        second = self._part(ranks[split:], None, depth)
        return torch.add(first, second, out=into)

    def _part(self, ranks: range, into: torch.Tensor | None, depth: int) -> torch.Tensor:
        """Sum of a subtree: in `into`, in a level, or the chunk itself if it needs no cast."""
        chunk = self._chunks[ranks[0]]
        if len(ranks) == 1 and not isinstance(chunk, RemoteRun) and chunk.dtype == self.dtype:
            return self._here(chunk)
        if into is not None:
            return self.tree(ranks, into, depth)
        return self.tree(ranks, self.level(depth), depth + 1)

    def _load(self, rank: int, into: torch.Tensor) -> None:
        """Put one chunk's block into `into`, in the dtype of the sum."""
        chunk = self._chunks[rank]
        if not isinstance(chunk, RemoteRun):
            into.copy_(self._here(chunk))
        elif chunk.dtype == self.dtype:
            chunk.read(self.start, into)
        else:
            if self._raw is None:
                self._raw = lasting(self._length, self._wire)
            raw = self._raw[: into.numel()]
            chunk.read(self.start, raw)
            into.copy_(raw)

    def _here(self, chunk: torch.Tensor | MessageRun) -> torch.Tensor:
        if isinstance(chunk, MessageRun):
            return chunk.window(self.start, self.width)
        return chunk[self.start : self.start + self.width]

    def squares(self, block: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the sums of squares of each row of `block` to the beginning of `rows`."""
        if self._squares is None:
            padded = -(-self._length // _ROW) * _ROW
            self._squares = lasting(padded, torch.float64)
        count = -(-block.numel() // _ROW)
        wide = self._squares[: count * _ROW]
        wide[: block.numel()].copy_(block)
        wide[block.numel() :].zero_()
        wide.mul_(wide)
        torch.sum(wide.view(count, _ROW), dim=1, out=rows[:count])
