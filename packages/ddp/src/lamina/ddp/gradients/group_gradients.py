"""Gradients of one group: accumulated into a flat buffer, summed over ranks, kept as main grads.

Two buffers take part. `local` holds this rank's own gradients of the whole group. Main grads hold
what the optimizer reads, where the strategy's placement says. They are the same storage where
main grads are whole, of the wire's dtype, and nothing reduced has to be kept apart. Gradients that
nothing is added to are kept in the wire dtype, so that they are copied once; the first addition
makes the buffer one of the dtype of sums.

A reduced gradient is never reduced again: once main grads are FINAL, what a further backward adds
is summed apart and then added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from lamina.buffers import BufferLayout, FlatBuffer
from lamina.collectives import Handle
from lamina.ddp.gradients.reduction import RankSumFactory
from lamina.ddp.gradients.scratch import TransientBuffers
from lamina.ddp.gradients.sums import GradientState, RankSum, Squares
from lamina.ddp.parameters.dtypes import GroupDtypes
from lamina.ddp.parameters.strategy import Cadence

__all__ = ["GroupGradients"]


class GroupGradients:
    """The gradient of one group of parameters, from autograd to the optimizer.

    Args:
        layout: where each parameter lies.
        rank_sum: sums over ranks into the buffer of main grads.
        dtypes: dtypes of the group.
        cadence: when `reduce` is called; decides in which dtype a rank accumulates.
        all_stepped: whether this rank's optimizer reads all of its main grads. If not, main grads
            are whole and the optimizer is cut: then local gradients have storage of their own,
            since who zeroes what the optimizer reads would leave some of them.
    """

    def __init__(
        self,
        layout: BufferLayout,
        rank_sum: RankSum,
        dtypes: GroupDtypes,
        cadence: Cadence,
        *,
        all_stepped: bool = True,
    ) -> None:
        self.layout = layout
        self.main: FlatBuffer = rank_sum.main
        self.dtypes = dtypes
        self.state = GradientState.EMPTY
        self.written = [False] * len(layout.specs)
        """Which parameters have a gradient in `local`."""
        self.sunk: set[int] = set()
        """Parameters whose gradient a layer wrote there itself, in the backward at hand."""
        self.seen = [False] * len(layout.specs)
        """Which parameters got a gradient since main grads were empty."""
        self.at_risk = False
        """A backward that has not ended has (or may have) added to gradients held before it."""
        self.finalised = False
        """`finalize_grads` has been over what main grads hold."""
        self.last_microbatch = False
        """Whether the backward at hand is the step's last one, as far as the reducer knows."""
        self.when_final: Callable[[torch.Tensor], None] | None = None
        """Called with main grads (flat) that a step's last reduction has made, to change them."""
        self.accumulates_in_main = rank_sum.main.is_whole and all_stepped
        """Whether local gradients may lie where main grads do."""
        self._padding = layout.padding_ranges()
        self._cadence = cadence
        self._held = False  # when the backward at hand began
        self._layers_write = False  # some layer has asked for its gradient's place
        self._sum = rank_sum
        self._transient: TransientBuffers = rank_sum.transient
        self._local: torch.Tensor | None = None
        self._carried: torch.Tensor | None = None  # final gradients of an earlier backward

    @property
    def cadence(self) -> Cadence:
        """When `reduce` is called."""
        return self._cadence

    def set_cadence(self, cadence: Cadence) -> None:
        """Choose when `reduce` will be called. Raises RuntimeError while gradients are held."""
        self._refuse_held("how often they are summed")
        self._cadence = cadence

    def set_sum(self, make: RankSumFactory, scale: float | None) -> None:
        """Choose how `reduce` sums, and the factor. Raises like `set_cadence`."""
        self._refuse_held("the factor of their sum")
        self._sum = make(self.main, self._sum.axes, scale, self._transient)

    def _refuse_held(self, what: str) -> None:
        if self.state is not GradientState.EMPTY or self.has_local:
            raise RuntimeError(
                f"gradients of {self.layout.specs[0].name} are being accumulated: choose {what} "
                "before the first backward, or after zero_grad()"
            )

    @property
    def wire_bytes(self) -> int:
        """Bytes of the buffer that a reduction sends from."""
        return self.layout.size * self.dtypes.wire.itemsize

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that were not yet summed over ranks."""
        return self._local is not None

    def view(self, index: int) -> torch.Tensor:
        """The place of one parameter's gradient in the local buffer, shaped like the parameter."""
        local = self._local if self._local is not None else self._open()
        spec = self.layout.specs[index]
        offset = self.layout.offsets[index]
        return local[offset : offset + spec.numel].view(spec.shape)

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient, as autograd produced it (one read, one write)."""
        self.at_risk = self.at_risk or self._held
        if self.written[index]:
            self._widen()
            self.view(index).add_(gradient)
            return
        if self._local is None and self.last_microbatch and not self._layers_write:
            # The only gradients of this step, most likely: put them where they are sent from.
            self._open(self._narrow_dtype)
        self.view(index).copy_(gradient)
        self.written[index] = True

    def place(self, index: int) -> torch.Tensor:
        """The same as `view`, for a layer that writes or adds its gradient there itself."""
        self._layers_write = True
        self.at_risk = self.at_risk or self._held
        self._widen()
        return self.view(index)

    def discard(self) -> None:
        """Forget everything: gradients were zeroed, or a backward died half-way."""
        self._close_local()
        self._sum.forget()
        self._carried = None
        self.state = GradientState.EMPTY
        self._held = self.at_risk = self.finalised = False
        self.seen = [False] * len(self.seen)

    def zero_if_empty(self) -> None:
        """Make main grads zeros where nothing was reduced: somebody is about to add to them."""
        if self.state is GradientState.EMPTY:
            self.main.data.zero_()
            self.state = GradientState.FINAL

    @property
    def kept_apart(self) -> bool:
        """Whether there are gradients that who writes to main grads does not reach."""
        outside = self.state is GradientState.PARTIAL and not self._sum.sums_in_main
        if outside or self._carried is not None:
            return True
        return self._local is not None and self._local.data_ptr() != self.main.data.data_ptr()

    def clear_place(self) -> None:
        """Put zeros where main grads hold nothing yet: somebody may look at them early.

        Negative ones where gradients are kept apart, so that `zero_()` can be told from other
        writes (see `lamina.ddp.backward.grad_attribute`).
        """
        sums = self.state is GradientState.PARTIAL and self._sum.sums_in_main
        if not self.kept_apart:
            for index, written in enumerate(self.written if self.has_local else ()):
                if not written:
                    self.view(index).zero_()
        elif self.state is not GradientState.FINAL and not sums:
            self.main.data.fill_(-0.0)

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient, where it is not part of sums that are kept apart."""
        sums = self.state is GradientState.PARTIAL and self._sum.sums_in_main
        if self.state is GradientState.FINAL or sums:
            self.main.span_view(index).zero_()
            self.seen[index] = False
        self.written[index] = False

    def scale(self, factor: float) -> None:
        """Multiply all gradients, those not yet summed over ranks included."""
        main = self.main.data if self.state is not GradientState.EMPTY else None
        for tensor in (main, self._local, self._carried):
            if tensor is not None:
                tensor.mul_(factor)
        self._sum.squares = None
        self._sum.scale_kept(factor)

    def begin_backward(self, last: bool, *, emptied: bool) -> None:
        """A backward begins.

        Args:
            last: whether it is the step's last one.
            emptied: whether `.grad` is emptied for it, which then shows no longer that somebody
                has dropped the gradients.
        """
        self.sunk.clear()
        self.last_microbatch = last
        self._held = self.state is not GradientState.EMPTY or self.has_local
        self.at_risk = self._held and emptied

    def end_backward(self) -> None:
        """It has ended, and all that it brought is where it belongs."""
        self.sunk.clear()
        self._held = self.at_risk = False

    def abandon_backward(self) -> None:
        """It has died: forget what it brought, unless that is mixed with what was held before."""
        if not self._held:
            self._close_local()

    @property
    def squares(self) -> Squares | None:
        """Sum of squares of final main grads, if their reduction has found it by the way.

        Reductions look for it from the first time that somebody asks.
        """
        self._sum.finds_squares = True
        return self._sum.squares if self.state is GradientState.FINAL else None

    def skip(self, final: bool) -> None:
        """No rank had gradients for this group in a microbatch that was reduced."""
        self._sum.skip(final)

    def reduce(self, final: bool) -> Iterator[Handle]:
        """Sum over ranks: a generator that yields each collective's handle to be waited for.

        Args:
            final: whether this is the step's last microbatch: then the outer axis is summed too
                and the scale applied.
        """
        self.at_risk = self.at_risk or self._held
        local = self._sealed_local()
        self.seen = [a or b for a, b in zip(self.seen, self.written, strict=True)]
        adds = final and self._sum.adds_to_final and self.when_final is None
        if self.state is GradientState.FINAL and not adds:
            self._carried = self.main.data.clone()
            self.state = GradientState.EMPTY
        before, self.state = self.state, GradientState.FINAL if final else GradientState.PARTIAL
        # From here on the buffer belongs to the collective: a gradient that comes later opens
        # another one.
        self._forget_local()
        wire = self._to_wire(local)
        yield from self._sum.run(wire, before, final)
        if final and self.when_final is not None:
            self.when_final(self.main.data)
            self._sum.squares = None
        if final and self._carried is not None:
            self.main.data.add_(self._carried)
            self._carried = self._sum.squares = None
        for buffer in {id(tensor): tensor for tensor in (wire, local)}.values():
            self._give_back(buffer)

    def _to_wire(self, local: torch.Tensor) -> torch.Tensor:
        if local.dtype == self.dtypes.wire:
            return local
        wire = self._transient.take(local.numel(), self.dtypes.wire, local.device)
        return wire.copy_(local)

    # -- the local buffer ---------------------------------------------------------------------

    @property
    def _sum_dtype(self) -> torch.dtype:
        """What a rank adds its own gradients in."""
        return self.dtypes.grads if self._cadence is Cadence.ONCE else self.dtypes.wire

    @property
    def _narrow_dtype(self) -> torch.dtype:
        """What a rank may keep gradients in that nothing is added to."""
        wire, wide = self.dtypes.wire, self._sum_dtype
        return wire if wire.itemsize < wide.itemsize else wide

    def _widen(self) -> None:
        """Something is to be added: a buffer in the wire dtype becomes one in the dtype of sums."""
        narrow = self._local
        if narrow is None or narrow.dtype == self._sum_dtype:
            return
        self._open(self._sum_dtype).copy_(narrow)
        self._give_back(narrow)

    def _open(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make the local buffer. Where main grads are whole and empty, it is their storage."""
        dtype = dtype or self._sum_dtype
        aliases = (
            self.accumulates_in_main
            and dtype == self.main.dtype
            and self._sum.device == self.main.device
            and self.state is GradientState.EMPTY
        )
        if aliases:
            self._local = self.main.data
        else:
            self._local = self._transient.take(self.layout.size, dtype, self._sum.device)
        return self._local

    def _sealed_local(self) -> torch.Tensor:
        """The local buffer with zeros wherever no gradient was written, padding included."""
        local = self._local if self._local is not None else self._open()
        for start, stop in self._padding:
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
        if self.main.has_memory and buffer.data_ptr() == self.main.data.data_ptr():
            return
        self._transient.give(buffer)
