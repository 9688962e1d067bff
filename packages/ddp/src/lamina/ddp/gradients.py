"""Gradients of one group: accumulated into a flat buffer, summed over ranks, kept as main grads.

Two buffers take part. `local` holds this rank's own gradients of the whole group. Main grads hold
what the optimizer reads, where the strategy's placement says. They are the same storage where
main grads are whole and nothing reduced has to be kept apart.

A reduced gradient is never reduced again: once main grads are FINAL, what a further backward adds
is summed apart and then added.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import torch

from lamina.buffers import BufferLayout, FlatBuffer, Shard
from lamina.collectives import Handle, all_gather_into, all_reduce_fp32, reduce_scatter_fp32
from lamina.ddp.axes import DataParallelAxes
from lamina.ddp.precision import GroupDtypes
from lamina.ddp.strategy import Cadence

__all__ = ["GradientState", "GroupGradients", "TransientBuffers"]


class GradientState(Enum):
    """What main grads hold."""

    EMPTY = auto()
    """Nothing (their bytes mean nothing)."""
    PARTIAL = auto()
    """Sums of some microbatches, not yet scaled nor summed over the outer axis."""
    FINAL = auto()
    """The gradient that the optimizer reads."""


class TransientBuffers:
    """Flat tensors that live from a gradient's first write to its collective's end.

    Freed tensors are kept for the next unit of the same size until `clear`: on a CPU a fresh
    allocation costs a page fault every 4 KiB, about as much as summing the buffer.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised flat tensor."""
        stack = self._free.get((numel, dtype, device))
        return stack.pop() if stack else torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Give a tensor back; no work on it may be pending on another stream."""
        key = (tensor.numel(), tensor.dtype, tensor.device)
        self._free.setdefault(key, []).append(tensor)

    def clear(self) -> None:
        """Return all free tensors to the allocator."""
        self._free.clear()


class GroupGradients:
    """The gradient of one group of parameters, from autograd to the optimizer.

    Args:
        layout: where each parameter lies.
        main: buffer of main grads (dtype of main grads, their placement).
        axes: data-parallel axes.
        dtypes: dtypes of the group.
        cadence: when `reduce` is called; decides in which dtype a rank accumulates.
        scale: factor applied once, to the fp32 sum after the outermost axis; None for none.
        transient: where buffers come from that do not live for a whole step.
    """

    def __init__(
        self,
        layout: BufferLayout,
        main: FlatBuffer,
        axes: DataParallelAxes,
        dtypes: GroupDtypes,
        cadence: Cadence,
        scale: float | None,
        transient: TransientBuffers,
    ) -> None:
        self.layout = layout
        self.main = main
        self.axes = axes
        self.dtypes = dtypes
        self.scale = scale
        self.state = GradientState.EMPTY
        self.written = [False] * len(layout.specs)
        """Which parameters have a gradient in `local`."""
        self.seen = [False] * len(layout.specs)
        """Which parameters got a gradient since main grads were empty."""
        self._cadence = cadence
        self._transient = transient
        self._local: torch.Tensor | None = None
        self._partial: torch.Tensor | None = None  # sums over the inner axis only
        self._carried: torch.Tensor | None = None  # final gradients of an earlier backward
        self._outer_sharded = isinstance(main.placement[0], Shard)
        self._inner_sharded = isinstance(main.placement[1], Shard)

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that were not yet summed over ranks."""
        return self._local is not None

    def view(self, index: int) -> torch.Tensor:
        """The place of one parameter's gradient in the local buffer, shaped like the parameter."""
        local = self._local if self._local is not None else self._open()
        spec = self.layout.specs[index]
        offset = self.layout.offset(spec.name)
        return local[offset : offset + spec.numel].view(spec.shape)

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient, as autograd produced it (one read, one write)."""
        view = self.view(index)
        if self.written[index]:
            view.add_(gradient)
        else:
            view.copy_(gradient)
            self.written[index] = True

    def discard(self) -> None:
        """Forget everything: gradients were zeroed, or a backward died half-way."""
        self._close_local()
        self._partial = self._carried = None
        self.state = GradientState.EMPTY
        self.seen = [False] * len(self.seen)

    def zero_if_empty(self) -> None:
        """Make main grads zeros where nothing was reduced: somebody is about to add to them."""
        if self.state is GradientState.EMPTY:
            self.main.data.zero_()
            self.state = GradientState.FINAL

    def discard_local(self) -> None:
        """Forget only what was not yet summed over ranks."""
        self._close_local()

    def reduce(self, final: bool) -> Iterator[Handle]:
        """Sum over ranks: a generator that yields each collective's handle to be waited for.

        Args:
            final: whether this is the step's last microbatch: then the outer axis is summed too
                and the scale applied.
        """
        local = self._sealed_local()
        self.seen = [a or b for a, b in zip(self.seen, self.written, strict=True)]
        one_axis = self.axes.outer.size == 1
        if self.state is GradientState.FINAL and not (final and one_axis):
            self._carried = self.main.data.clone()
            self.state = GradientState.EMPTY
        before, self.state = self.state, GradientState.FINAL if final else GradientState.PARTIAL
        # From here on the buffer belongs to the collective: a gradient that comes later opens
        # another one.
        self._forget_local()
        wire = self._to_wire(local)
        yield from (self._over_one_axis if one_axis else self._over_two_axes)(wire, before, final)
        if final and self._carried is not None:
            self.main.data.add_(self._carried)
            self._carried = None
        for buffer in {id(tensor): tensor for tensor in (wire, local)}.values():
            self._give_back(buffer)

    def _over_one_axis(
        self, wire: torch.Tensor, before: GradientState, final: bool
    ) -> Iterator[Handle]:
        """Only the inner axis: one collective, with the scale in it where the sum is complete."""
        # With sums of earlier microbatches in main grads, the scale has to wait until the last
        # one is added: law 2 scales the whole sum once.
        fused = final and before is not GradientState.PARTIAL
        collective = reduce_scatter_fp32 if self._inner_sharded else all_reduce_fp32
        yield collective(
            self.main.data,
            wire,
            self.axes.inner.sibling("reduce"),
            scale=self.scale if fused else None,
            accumulate=before is not GradientState.EMPTY,
            async_op=True,
        )
        if final and not fused and self.scale is not None:
            self.main.data.mul_(self.scale)

    def _over_two_axes(
        self, wire: torch.Tensor, before: GradientState, final: bool
    ) -> Iterator[Handle]:
        """Inner axis at every call, into `partial`; the outer one in fp32 at the last."""
        outer, inner = self.axes.groups("reduce")
        whole_inner = self._outer_sharded and not self._inner_sharded
        if self._partial is None:
            pieces = 1 if whole_inner else self.axes.inner.size
            dtype = torch.promote_types(wire.dtype, torch.float32)
            self._partial = self._transient.take(
                self.layout.size // pieces, dtype, self.main.data.device
            )
        partial = self._partial
        yield (all_reduce_fp32 if whole_inner else reduce_scatter_fp32)(
            partial,
            wire,
            inner,
            accumulate=before is GradientState.PARTIAL,
            async_op=True,
        )
        if not final:
            return
        main = self.main.data
        if self._outer_sharded:
            yield reduce_scatter_fp32(main, partial, outer, scale=self.scale, async_op=True)
        elif self._inner_sharded:
            yield all_reduce_fp32(main, partial, outer, scale=self.scale, async_op=True)
        else:
            piece = partial.numel()
            own = main[self.axes.inner.rank * piece : (self.axes.inner.rank + 1) * piece]
            yield all_reduce_fp32(own, partial, outer, scale=self.scale, async_op=True)
            yield all_gather_into(main, own, inner, async_op=True)
        self._transient.give(partial)
        self._partial = None

    def _to_wire(self, local: torch.Tensor) -> torch.Tensor:
        if local.dtype == self.dtypes.wire:
            return local
        wire = self._transient.take(local.numel(), self.dtypes.wire, local.device)
        return wire.copy_(local)

    # -- the local buffer ---------------------------------------------------------------------

    def _open(self) -> torch.Tensor:
        """Make the local buffer. Where main grads are whole and empty, it is their storage."""
        dtype = self.dtypes.grads if self._cadence is Cadence.ONCE else self.dtypes.wire
        aliases = (
            not self._inner_sharded
            and not self._outer_sharded
            and dtype == self.main.data.dtype
            and self.state is GradientState.EMPTY
        )
        if aliases:
            self._local = self.main.data
        else:
            self._local = self._transient.take(self.layout.size, dtype, self.main.data.device)
        return self._local

    def _sealed_local(self) -> torch.Tensor:
        """The local buffer with zeros wherever no gradient was written, padding included."""
        local = self._local if self._local is not None else self._open()
        for start, stop in self.layout.padding_ranges():
            local[start:stop].zero_()
        for index, written in enumerate(self.written):
            if not written:
                self.view(index).zero_()
        return local

    def _close_local(self) -> None:
        local = self._local
        self._forget_local()
        if local is not None:
            self._give_back(local)

    def _forget_local(self) -> None:
        self._local = None
        self.written = [False] * len(self.written)

    def _give_back(self, buffer: torch.Tensor) -> None:
        if buffer.data_ptr() != self.main.data.data_ptr():
            self._transient.give(buffer)
