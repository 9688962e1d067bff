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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lamina.models.plan.record.step_record import Life, StepRecord

_MIB = 1 << 20
_LEAST = 512
_SEGMENT = 2 * _MIB
_SEGMENT_OF_MIDDLE = 20 * _MIB
_LARGE = 10 * _MIB

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


def reserved_for(
    before: StepRecord, record: StepRecord, workspaces: int = 0, *, made_early: bool = True
) -> int:
    """Bytes that are reserved once steps repeat a record.

    Args:
        before: what makes the memory that steps rest on, and the first step. It leaves holes in
            which steady steps find their places.
        record: of the step that comes next, and again.
        workspaces: bytes that libraries keep for products, in two equal parts.
        made_early: whether they are made before anything else, as Lamina has it. Otherwise the
            first products of a forward and of a backward make them.
    """
    allocator, blocks = CachingAllocator(), dict[int, Block]()

    def play(lives: Sequence[Life]) -> None:
        for life, nbytes in _changes(lives):
            if (block := blocks.pop(id(life), None)) is not None:
                allocator.give_back(block)
            if nbytes:
                blocks[id(life)] = allocator.take(nbytes, life.stream)

    at = [0, 0] if made_early else _first_products(before)
    kept = [Life(event, "workspaces", False, [(event, workspaces // 2)]) for event in at]
    play([*kept, *before.lives])
    # What is there still keeps its place, and the holes around it stay as they are.
    for life in record.lives:
        if (block := blocks.pop(id(life.earlier), None)) is not None:
            blocks[id(life)] = block
    play(record.lives)
    # The record begins with what the step before it has left. Now that is its own.
    for left, made in _left_over(record):
        if (block := blocks.pop(id(made), None)) is not None:
            blocks[id(left)] = block
    play(record.lives)
    return allocator.reserved


def _left_over(record: StepRecord) -> Iterator[tuple[Life, Life]]:
    """What a step gives back of the step before it, and what it makes in its place."""
    made = defaultdict[int, list[Life]](list)
    for life in record.lives:
        if life.earlier is None and life.died is None:
            made[life.sizes[-1][1]].append(life)
    for life in record.lives:
        if life.earlier is not None and life.died is not None and made[life.sizes[0][1]]:
            yield life, made[life.sizes[0][1]].pop(0)


def _first_products(record: StepRecord) -> list[int]:
    """Events of the first product of a forward, and of a backward."""
    firsts: dict[bool, int] = {}
    for operation in record.operations:
        if operation.flops:
            firsts.setdefault(operation.backward > 0, operation.at)
    return list(firsts.values())


def _changes(lives: Sequence[Life]) -> list[tuple[Life, int]]:
    """Storages and their new sizes, in order: what goes at an event goes first."""
    changes = []
    for number, life in enumerate(lives):
        for at, nbytes in life.sizes[0 if life.earlier is None else 1 :]:
            changes.append((at, nbytes > 0, number, life, nbytes))
        if life.died is not None:
            changes.append((life.died, False, number, life, 0))
    changes.sort(key=lambda change: change[:3])
    return [(life, nbytes) for *_, life, nbytes in changes]
