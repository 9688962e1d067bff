"""One tree of additions over (microbatch x ranks + rank): the same bits for any number of ranks.

The gradients of one microbatch on one rank are a leaf. Leaf k of n is added in the pairwise tree
that splits at the largest power of two below n, whoever computed it. Sums of complete subtrees are
kept, at most one per power of two, so a step of n leaves keeps log2(n) shards; D ranks with D a
power of two are a complete subtree, which the ordered reduce-scatter sums by itself.
"""

from collections.abc import Generator, Iterator

import torch

from lamina.collectives import Handle, all_gather_into, all_to_all, reduce_scatter_fp32
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.gradients.sums import RankSum
from lamina.mesh.engine import MeshAxis

__all__ = ["PartialSums", "ReproducibleSum"]


class PartialSums:
    """Sums of complete subtrees, largest (and earliest) first: a binary counter of tensors.

    Tensors that are merged into others go to `scratch`.
    """

    def __init__(self, scratch: ScratchBuffers) -> None:
        self._scratch = scratch
        self._stack: list[tuple[int, torch.Tensor | None]] = []

    def push(self, block: torch.Tensor | None, leaves: int) -> None:
        """Append the sum of the next `leaves` leaves (a power of two); None for no gradients.

        The tensor belongs to this object from here on.
        """
        while self._stack and self._stack[-1][0] == leaves:
            _, left = self._stack.pop()
            block = self._add(left, block)
            leaves *= 2
        self._stack.append((leaves, block))

    def take(self) -> torch.Tensor | None:
        """The sum of all leaves; nothing is kept."""
        total: torch.Tensor | None = None
        while self._stack:
            total = self._add(self._stack.pop()[1], total)
        return total

    def scale(self, factor: float) -> None:
        """Multiply all leaves."""
        for _, tensor in self._stack:
            if tensor is not None:
                tensor.mul_(factor)

    def clear(self) -> None:
        """Forget all leaves."""
        for _, tensor in self._stack:
            if tensor is not None:
                self._scratch.give(tensor)
        self._stack = []

    def _add(self, left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        left.add_(right)
        self._scratch.give(right)
        return left


class ReproducibleSum(RankSum):
    """Leaves are brought to the rank that owns a piece, along every axis and every microbatch."""

    def __init__(self, *state: object) -> None:
        super().__init__(*state)  # type: ignore[arg-type]
        self._sums = PartialSums(self.scratch)
        ranks = {False: (self.axes.inner, 1), True: (self.axes.outer, self.axes.inner.size)}
        # The axis that the placement cuts last is scattered last: what is cut along neither is
        # gathered again in the reverse order.
        outer_first = self.outer_sharded and not self.inner_sharded
        self._sequence: list[tuple[MeshAxis, int, bool]] = []
        for outer in (True, False) if outer_first else (False, True):
            axis, stride = ranks[outer]
            if axis.size > 1:
                cut = self.outer_sharded if outer else self.inner_sharded
                self._sequence.append((axis, stride, cut))

    def run(self, wire: torch.Tensor, before: GradientState, final: bool) -> Iterator[Handle]:
        """Scatter this microbatch's leaves to their owners; at the last, bring the sum home."""
        blocks, leaves = [(0, wire)], 1
        for axis, stride, _ in self._sequence:
            if len(blocks) == 1 and stride == leaves and axis.size & (axis.size - 1) == 0:
                given = blocks[0][1]
                dtype = torch.promote_types(given.dtype, torch.float32)
                total = self.scratch.take(given.numel() // axis.size, dtype, given.device)
                yield reduce_scatter_fp32(
                    total, given, axis.sibling("reduce"), async_op=True, statistics=False
                )
                blocks, leaves = [(0, total)], leaves * axis.size
                self._give_back(given, wire)
            else:
                blocks = yield from self._exchange(blocks, axis, stride, wire)
        for _, block in sorted(blocks, key=lambda entry: entry[0]):
            self._sums.push(self._owned(block, wire), leaves)
        if final:
            yield from self._finish()

    def _exchange(
        self,
        blocks: list[tuple[int, torch.Tensor]],
        axis: MeshAxis,
        stride: int,
        wire: torch.Tensor,
    ) -> Generator[Handle, None, list[tuple[int, torch.Tensor]]]:
        """Leaves that no complete subtree can take in: every one travels to its owner."""
        received = []
        for index, block in blocks:
            room = torch.empty_like(block)
            yield all_to_all(room, block, axis.sibling("reduce"), async_op=True)
            self._give_back(block, wire)
            rows = room.view(axis.size, -1).unbind(0)
            received += [(index + rank * stride, row) for rank, row in enumerate(rows)]
        return received

    def _finish(self) -> Iterator[Handle]:
        total = self._sums.take()
        start, length = 0, self.main.layout.size
        for axis, _, _ in self._sequence:
            length //= axis.size
            start += axis.rank * length
        start -= self.main.range[0]
        own = self.main.data[start : start + length]
        if total is None:
            own.zero_()
        else:
            own.copy_(total if self.scale is None else total.mul_(self.scale))
            self.scratch.give(total)
        for axis, _, cut in reversed(self._sequence):
            if not cut:
                start -= axis.rank * length
                length *= axis.size
                region = self.main.data[start : start + length]
                yield all_gather_into(region, own, axis.sibling("reduce"), async_op=True)
                own = region

    def skip(self, final: bool) -> None:
        """Leaves without gradients keep their places in the tree."""
        if final:
            self.forget()
        for _ in range(0 if final else self.axes.size):
            self._sums.push(None, 1)

    def forget(self) -> None:
        """Drop the leaves of microbatches before."""
        self._sums.clear()

    def scale_kept(self, factor: float) -> None:
        """Multiply the leaves of microbatches before."""
        self._sums.scale(factor)

    def _owned(self, block: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
        """The block in the dtype of sums, as storage of its own."""
        dtype = torch.promote_types(block.dtype, torch.float32)
        whole_storage = block.untyped_storage().nbytes() == block.numel() * block.element_size()
        if block is not wire and block.dtype == dtype and whole_storage:
            return block
        return self.scratch.take(block.numel(), dtype, block.device).copy_(block)

    def _give_back(self, block: torch.Tensor, wire: torch.Tensor) -> None:
        if block is not wire and block._base is None:
            self.scratch.give(block)
