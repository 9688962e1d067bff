"""What PyTorch's caching allocator reserves on a GPU for the tensors of a record.

The rules are those of `CUDACachingAllocator` (torch 2.11 to 2.15) with its default settings. The
memory has no limit here, so nothing that is reserved is given back.

- Sizes are rounded up to 512 bytes. Those up to 1 MiB share segments of 2 MiB, those below 10 MiB
  segments of 20 MiB, and larger ones get a segment of a multiple of 2 MiB.
- A request takes the smallest free block of its stream that holds it, the one at the lowest address
  of several, and gives back the rest, if that is 512 bytes (of small blocks) or more than 1 MiB.
- A free block joins its free neighbours in the segment.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from lamina.models.plan.record.step_record import Life, StepRecord

_MIB = 1 << 20
_LEAST = 512
_SEGMENT = 2 * _MIB
_SEGMENT_OF_MIDDLE = 20 * _MIB
_LARGE = 10 * _MIB
_STEPS = 3
"""Steps that are played: the first makes the optimizer's state, the second finds it in its way."""

Pool = tuple[int, bool]
"""Blocks that serve each other's requests: those of a stream, small or large."""


@dataclass(eq=False)
class Block:
    """Neighbouring bytes of a segment, in use or free."""

    pool: Pool
    address: int
    size: int
    is_free: bool = False
    before: Block | None = None
    after: Block | None = None


class CachingAllocator:
    """Blocks and segments of one device, without their memory.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.take(3 << 20)
        >>> allocator.reserved >> 20
        20
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._blocks: dict[int, Block] = {}  # free ones, by address
        self._free: defaultdict[Pool, list[tuple[int, int]]] = defaultdict(list)

    def take(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate."""
        size = max(_LEAST, -(-nbytes // _LEAST) * _LEAST)
        small = size <= _MIB
        ways = self._free[stream, small]
        place = bisect_left(ways, (size, -1))
        block = self._blocks.pop(ways.pop(place)[1]) if place < len(ways) else None
        if block is None:
            block = self._segment((stream, small), size)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _MIB:
            left = Block(block.pool, block.address + size, rest, True, block, block.after)
            if block.after is not None:
                block.after.before = left
            block.after, block.size = left, size
            self._offer(left)
        block.is_free = False
        return block

    def give_back(self, block: Block) -> None:
        """Free."""
        if (before := block.before) is not None and before.is_free:
            block = self._join(before, block)
        if (after := block.after) is not None and after.is_free:
            block = self._join(block, after)
        block.is_free = True
        self._offer(block)

    def _segment(self, pool: Pool, size: int) -> Block:
        whole = -(-size // _SEGMENT) * _SEGMENT
        if pool[1]:
            whole = _SEGMENT
        elif size < _LARGE:
            whole = _SEGMENT_OF_MIDDLE
        # Segments have gaps between them, so that no block is the neighbour of another segment's.
        block = Block(pool, 2 * self.reserved, whole)
        self.reserved += whole
        return block

    def _join(self, first: Block, second: Block) -> Block:
        for block in (first, second):
            if block.is_free:
                del self._blocks[block.address]
                ways = self._free[block.pool]
                ways.pop(bisect_left(ways, (block.size, block.address)))
        first.size, first.after, first.is_free = first.size + second.size, second.after, False
        if second.after is not None:
            second.after.before = first
        return first

    def _offer(self, block: Block) -> None:
        self._blocks[block.address] = block
        insort(self._free[block.pool], (block.size, block.address))


def reserved_for(record: StepRecord, workspaces: int = 0) -> int:
    """Bytes that are reserved once steps repeat a record.

    Args:
        record: of a steady step, with the storages that were there before it.
        workspaces: bytes that libraries keep, in two equal parts, from the first products on.
    """
    allocator, blocks = CachingAllocator(), dict[int, Block]()
    # What a step leaves to the next one is made anew in each step.
    leaves = [life for life in record.lives if life.born and life.died is None]
    resting = [life for life in record.lives if not life.born and life.died is None]
    states = [life for life in resting if life.category == "optimizer state"]
    update = next((at for at, name in record.marks if name == "optimizer"), record.end)

    def resize(life: Life, nbytes: int) -> None:
        if (block := blocks.pop(id(life), None)) is not None:
            allocator.give_back(block)
        if nbytes:
            blocks[id(life)] = allocator.take(nbytes, life.stream)

    for life in resting:
        if life.category != "optimizer state":
            resize(life, life.sizes[0][1])
    changes = _changes(record)
    passes = [(life, nbytes) for at, life, nbytes in changes if at < update]
    updates = [(life, nbytes) for at, life, nbytes in changes if at >= update]
    left = [(life, 0) for life in leaves]
    made = [(life, life.sizes[0][1]) for life in states]
    for step in range(_STEPS):
        for life, nbytes in (*passes, *(made if step == 0 else ()), *updates):
            resize(life, nbytes)
        if step == 0 and workspaces:
            for _ in range(2):
                allocator.take(workspaces // 2)
        for life, nbytes in left:
            resize(life, nbytes)
    return allocator.reserved


def _changes(record: StepRecord) -> list[tuple[int, Life, int]]:
    """Events, storages and their new sizes, in order: what goes at an event goes first."""
    changes = []
    for number, life in enumerate(record.lives):
        if not life.born and life.died is not None:
            continue  # left by the step before, where it is made and given back
        begin = 0 if life.born else 1
        for at, nbytes in life.sizes[begin:]:
            changes.append((at, nbytes > 0, number, life, nbytes))
        if life.died is not None:
            changes.append((life.died, False, number, life, 0))
    changes.sort(key=lambda change: change[:3])
    return [(at, life, nbytes) for at, _, _, life, nbytes in changes]
