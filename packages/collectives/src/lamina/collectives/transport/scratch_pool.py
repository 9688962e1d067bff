"""Memory that one collective leaves for the next: on a CPU fresh pages cost as much as the work."""

import threading

import torch

__all__ = ["ScratchPool", "SumBuffers"]

_MOST_BYTES = 64 << 20


def _host_memory(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory that outlives a call. No inference tensor: later calls could not write to it."""
    with torch.inference_mode(False):
        return torch.empty(numel, dtype=dtype, device="cpu")


class SumBuffers:
    """Buffers of one block's size, for one sum at a time.

    There is one per level of the tree, one for a block as it came over the wire, and one for
    squares. Each is made when it is first asked for and kept for the next sum.
    """

    def __init__(self) -> None:
        self._length = self._raw_length = 0
        self._wire = self._dtype = torch.float32
        self._levels: list[torch.Tensor] = []
        self._raw: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    def fit(self, length: int, raw_length: int, wire: torch.dtype, dtype: torch.dtype) -> None:
        """Serve blocks of at most `length` elements that are summed in `dtype`.

        On the wire these take `raw_length` items of dtype `wire`.
        """
        small = length > self._length or raw_length > self._raw_length
        if small or (wire, dtype) != (self._wire, self._dtype):
            self._length, self._raw_length = length, raw_length
            self._wire, self._dtype = wire, dtype
            self._levels, self._raw, self._squares = [], None, None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers that were made."""
        buffers = (*self._levels, self._raw, self._squares)
        return sum(buffer.nbytes for buffer in buffers if buffer is not None)

    def level(self, index: int) -> torch.Tensor:
        """The buffer of one level of the tree."""
        while len(self._levels) <= index:
            self._levels.append(_host_memory(self._length, self._dtype))
        return self._levels[index]

    def raw(self) -> torch.Tensor:
        """The buffer of a block as it came over the wire."""
        if self._raw is None:
            self._raw = _host_memory(self._raw_length, self._wire)
        return self._raw

    def squares(self, row: int) -> torch.Tensor:
        """The buffer of a block's squares: float64, whole rows of `row` elements."""
        if self._squares is None:
            self._squares = _host_memory(-(-self._length // row) * row, torch.float64)
        return self._squares


class ScratchPool:
    """Scratch and sum buffers of one group, lent to one collective at a time.

    Kept between calls: as many sets of sum buffers as sums ran at once (a few MiB each), and at
    most 64 MiB of scratch, which only ranks that exchange messages need.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scratch: list[torch.Tensor] = []
        self._scratch_bytes = 0
        self._sum_buffers: list[SumBuffers] = []

    def borrow(self, nbytes: int) -> torch.Tensor:
        """CPU scratch: uint8, at least `nbytes`, uninitialised."""
        with self._lock:
            sizes = [(kept.nbytes, at) for at, kept in enumerate(self._scratch)]
            fitting = [one for one in sizes if one[0] >= nbytes]
            if fitting:
                size, best = min(fitting)
                self._scratch_bytes -= size
                return self._scratch.pop(best)
        return _host_memory(nbytes, torch.uint8)

    def give_back(self, scratch: torch.Tensor) -> None:
        """Return what was borrowed. Where too much is kept, the oldest is freed."""
        with self._lock:
            self._scratch.append(scratch)
            self._scratch_bytes += scratch.nbytes
            while self._scratch_bytes > _MOST_BYTES:
                self._scratch_bytes -= self._scratch.pop(0).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes kept now (lent ones not counted)."""
        with self._lock:
            return self._scratch_bytes + sum(buffers.nbytes for buffers in self._sum_buffers)

    def clear(self) -> None:
        """Give what is kept back to the allocator; what is lent comes back as usual."""
        with self._lock:
            self._scratch.clear()
            self._scratch_bytes = 0
            self._sum_buffers.clear()

    def borrow_sum_buffers(self) -> SumBuffers:
        """Buffers for one sum."""
        with self._lock:
            return self._sum_buffers.pop() if self._sum_buffers else SumBuffers()

    def give_back_sum_buffers(self, buffers: SumBuffers) -> None:
        """Return them for the next sum."""
        with self._lock:
            self._sum_buffers.append(buffers)
