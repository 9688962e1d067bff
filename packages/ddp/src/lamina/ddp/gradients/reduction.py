"""Ways to sum gradients over ranks, as data: what `reduction=` and `reproducible=` choose.

`AxisSum` (in `lamina.ddp.gradients.group_gradients`) sums over one axis. Here are the sum over two
axes, and the reproducible one.

Note [One tree of microbatches and ranks]
    The gradients of one microbatch on one rank are a leaf. Leaf number microbatch x ranks + rank of
    n is added in the pairwise tree that splits at the largest power of two below n, whoever
    computed it: the same bits for any number of ranks. Sums of complete subtrees are kept, at most
    one per power of two, so a step of n leaves keeps log2(n) shards. D ranks with D a power of two
    are a complete subtree, which the ordered reduce-scatter sums by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from lamina.buffers import FlatBuffer
from lamina.buffers.engine import ScratchBuffers
from lamina.collectives import Handle, all_gather_into, all_to_all, reduce_scatter_fp32
from lamina.collectives.engine import (
    Checksums,
    ErrorFeedback,
    GradientCodec,
    Int8Blocks,
    ReductionName,
    reduction_class,
)
from lamina.ddp.gradients.group_gradients import (
    AxisSum,
    RankSum,
    RankSumFactory,
    Squares,
    SumSteps,
)
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.strategy import Cadence
from lamina.mesh.engine import MeshAxis


class TwoAxisSum(AxisSum):
    """The inner axis at every call, into a buffer apart; the outer one in fp32 at the last."""

    sums_in_main = adds_to_final = is_one_collective = False

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
        self._partial: torch.Tensor | None = None  # sums over the inner axis only

    def run(self, wire: torch.Tensor, before: GradientState, final: bool, finds: bool) -> SumSteps:
        """Reduce-scatter along the inner axis, then the outer one where the main grads lie."""
        # Where the outer axis alone cuts main grads, each rank needs the inner sums whole.
        whole_inner = self.outer_sharded and not self.inner_sharded
        if self._partial is None:
            pieces = 1 if whole_inner else self.axes.inner.size
            dtype = torch.promote_types(wire.dtype, torch.float32)
            self._partial = self.scratch.take(wire.numel() // pieces, dtype, wire.device)
        partial = self._partial
        inner = self._along(self.axes.inner, partial, wire, scatter=not whole_inner)
        adds = before is GradientState.PARTIAL
        yield inner.start(partial, wire, accumulate=adds, statistics=False)
        if not final:
            return None
        squares = yield from self._over_outer(partial, whole_inner, finds)
        self.forget()
        return squares

    def _over_outer(self, partial: torch.Tensor, whole_inner: bool, finds: bool) -> SumSteps:
        outer, inner = self.axes.outer, self.axes.inner
        main = own = self.main.data
        # Whole main grads: each rank sums its piece over the outer axis, and then all share them.
        if not self.inner_sharded and not self.outer_sharded:
            piece = partial.numel()
            own = main[inner.rank * piece : (inner.rank + 1) * piece]
        over_outer = self._along(outer, own, partial, scatter=self.outer_sharded, own=False)
        handle = over_outer.start(own, partial, scale=self.scale, statistics=finds)
        yield handle
        squares = None
        if finds:
            pieces = self.outer_sharded or over_outer.piecewise, not whole_inner
            squares = Squares(handle.squared_norm, pieces)
        if own is not main:
            yield all_gather_into(main, own, inner.sibling("reduce"), async_op=True)
        return squares

    def forget(self) -> None:
        """Give the buffer of inner sums back."""
        if self._partial is not None:
            self.scratch.give(self._partial)
        self._partial = None

    def scale_kept(self, factor: float) -> None:
        """Multiply the inner sums."""
        if self._partial is not None:
            self._partial.mul_(factor)


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

    def __init__(self, *state: Any) -> None:
        super().__init__(*state)
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

    def run(self, wire: torch.Tensor, before: GradientState, final: bool, finds: bool) -> SumSteps:
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
        return None  # its squares are left to whoever asks

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
        # Each axis of the sequence cuts what the one before has left. `main` may itself be a part
        # of the whole, so its own beginning is subtracted.
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
        # Axes that cut no main gradients put their pieces together again, in the opposite order.
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


@dataclass(frozen=True)
class GradientReduction:
    """One way to sum gradients over ranks.

    `make` makes the sum of one group, at a cadence of its own or, with None, of the strategy. A
    rank that `keeps_losses` keeps what its wire has lost: one fp32 number per element. Backends
    (NCCL) bring large ordered sums in slices of `message_bytes`, by default by the GPU's memory.
    """

    name: str
    make: RankSumFactory
    cadence: Cadence | None = None
    keeps_losses: bool = False
    message_bytes: int | None = None


Codec = Callable[[torch.Tensor, bool], GradientCodec | None]


def _over_axes(
    reduction: ReductionName,
    codec: Callable[[], Codec] | None = None,
    *,
    averages: bool = False,
    message_bytes: int | None = None,
) -> RankSumFactory:
    """Makes sums over axes; with `averages` the collectives divide by the ranks already.

    `codec` makes one for each sum, because what a codec has lost belongs to the sum's buffer.
    """
    prepare = partial(
        reduction_class(reduction), op="avg" if averages else "sum", message_bytes=message_bytes
    )

    def make(
        main: FlatBuffer, axes: DataParallelAxes, scale: float | None, scratch: ScratchBuffers
    ) -> RankSum:
        """Make the sum of one group."""
        # The backend divides by the ranks of each axis. What is left of the scale is usually 1, and
        # then nothing is multiplied.
        if averages:
            rest = (1.0 if scale is None else scale) * axes.size
            scale = None if rest == 1.0 else rest
        kind = AxisSum if axes.outer.size == 1 else TwoAxisSum
        return kind(prepare, codec and codec(), main, axes, scale, scratch)

    return make


def _int8() -> Codec:
    """Int8 blocks for a rank's own gradients. What a further axis adds up travels as it is."""
    blocks = ErrorFeedback(Int8Blocks())
    return lambda input, own: blocks if own else None


def _checksums() -> Codec:
    """Checksums for everything that travels."""
    return lambda input, own: Checksums(input.dtype)


ORDERED = GradientReduction("ordered", _over_axes("ordered"))
"""Sums in fp32 in one fixed order over ranks (law 2)."""

_REDUCTIONS = {
    "ordered": ORDERED,
    "native": GradientReduction("native", _over_axes("native")),
    "int8": GradientReduction("int8", _over_axes("ordered", _int8), keeps_losses=True),
    "checked": GradientReduction("checked", _over_axes("ordered", _checksums)),
}
_NATIVE_AVERAGE = GradientReduction("native", _over_axes("native", averages=True))
"""The backend divides by the number of ranks: sums in fp16 do not overflow."""
_REPRODUCIBLE = GradientReduction("reproducible", ReproducibleSum, Cadence.EVERY_MICROBATCH)
_NOT_REPRODUCIBLE = {
    "int8": "reduction='int8' adds to each gradient what this rank's earlier ones have lost on the "
    "wire, so other ranks would send other numbers, and reproducible=True gives the same bits for "
    "any number of ranks: use reduction='ordered'",
    "checked": "reduction='checked' and reproducible=True: the reproducible sum has no checksums "
    "on its wire; choose one",
    "native": "reduction='native' leaves the order of the sum to the backend, which "
    "reproducible=True fixes: use reduction='ordered'",
}


def resolve_reduction(
    reduction: str = "ordered",
    reproducible: bool = False,
    average: bool = False,
    *,
    per_token: bool = False,
    message_bytes: int | None = None,
) -> GradientReduction:
    """The reduction that settings ask for.

    Args:
        reduction: "ordered"; "checked" for the same with checksums on the wire (CPUs only);
            "native" for the backend's own (tolerance only); "int8" for the
            ordered sum of what a wire of int8 blocks makes of the gradients (docs/ddp.md).
        reproducible: one tree over microbatches and ranks: the same bits for every strategy and
            number of ranks. Every microbatch is reduced.
        average: let the backend average instead of sum, where it is the backend that adds. The
            ordered sum is scaled in fp32 as it is stored, whatever this says.
        per_token: sums are left for `finalize_grads` to divide.
        message_bytes: of the slices in which a backend (NCCL) brings large ordered sums; None
            chooses by the memory of the GPU.

    Raises:
        ValueError: for messages of no bytes or of a size that the reduction does not take, an
            unknown name, a native reduction that is to be reproducible, or an average of what is
            to be left a sum.
    """
    if average and per_token:
        raise ValueError(
            "average_in_collective=True averages over ranks and calculate_per_token_loss=True "
            "leaves sums for finalize_grads(num_tokens=) to divide: choose one"
        )
    if reduction not in _REDUCTIONS:
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"reduction={reduction!r} is not known; choose one of {known}")
    if message_bytes is not None:
        if message_bytes < 1:
            raise ValueError(f"reduce_message_bytes={message_bytes}: a message needs a byte")
        if reproducible or reduction != "ordered":
            raise ValueError(
                f"reduce_message_bytes={message_bytes} cuts ordered sums, and reduction="
                f"{reduction!r}, reproducible={reproducible} has messages of its own: leave it out"
            )
        make = _over_axes("ordered", message_bytes=message_bytes)
        return replace(ORDERED, make=make, message_bytes=message_bytes)
    if reproducible:
        if reduction in _NOT_REPRODUCIBLE:
            raise ValueError(_NOT_REPRODUCIBLE[reduction])
        return _REPRODUCIBLE
    return _NATIVE_AVERAGE if average and reduction == "native" else _REDUCTIONS[reduction]
