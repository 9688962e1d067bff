"""Gradients of one group: accumulated into a flat buffer, summed over ranks, kept as main grads.

Two buffers take part. The local buffer holds this rank's own gradients of the whole group. Main
grads hold what the optimizer reads, where the strategy's placement says. Both are one storage
where main grads are whole, of the dtype that this rank adds in, and hold nothing that was reduced.
A gradient that nothing is added to is kept in the wire dtype, so that it is copied once; the first
addition replaces that buffer by one in the dtype of sums.

A reduced gradient is never reduced again: once main grads are final, what a further backward
brings is summed apart and then added.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import or_
from weakref import WeakMethod

import torch

from lamina.buffers import BufferLayout, FlatBuffer, ShardedTensor
from lamina.collectives import Handle
from lamina.ddp.gradients.reduction import RankSumFactory
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.states import (
    BackwardEvent,
    BackwardPhase,
    GradientEvent,
    GradientState,
)
from lamina.ddp.gradients.sums import RankSum, Squares
from lamina.ddp.parameters.dtypes import GroupDtypes
from lamina.ddp.parameters.strategy import Cadence

__all__ = ["GroupGradients"]


class GroupGradients:
    """The gradient of one group of parameters, from autograd to the optimizer.

    `rank_sum` sums over ranks into the buffer of main grads, and `cadence` is when `reduce` is
    called: it decides in which dtype a rank accumulates. Unless `all_stepped`, this rank's
    optimizer does not read all of its main grads: they are whole and the optimizer is cut. Then
    local gradients have storage of their own, since who zeroes what the optimizer reads would leave
    some of them.
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
        self.accumulates_in_main = rank_sum.main.is_whole and all_stepped
        """Whether local gradients may lie where main grads do."""
        self.wire_bytes = layout.size * dtypes.wire.itemsize
        """Bytes of the buffer that a reduction sends from."""
        self._sum = rank_sum
        self._scratch: ScratchBuffers = rank_sum.scratch
        self._on_final: Callable[[torch.Tensor], None] | None = None
        self._before_buffers: WeakMethod[Callable[[int], None]] | None = None
        self._spans = [
            (offset, offset + spec.numel, spec.shape)
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        self._padding = list(layout.padding_ranges())
        count = len(layout.specs)
        self.state = GradientState.EMPTY
        """What main grads hold."""
        self._backward = BackwardPhase.IDLE
        self._is_last = False  # the backward at hand is the step's last one, as far as is known
        self._local: torch.Tensor | None = None
        self._adopted: set[int] = set()  # addresses of buffers that layers have given
        self._in_local = [False] * count  # which parameters have a gradient there
        # Gradients of spans that belong into the local buffer as soon as there has to be one:
        # elements (start, stop) of the parameter, and the gradient.
        self._of_spans: dict[int, tuple[int, int, torch.Tensor]] = {}
        self.by_layers: set[int] = set()
        """Parameters whose gradient a layer has written in the backward at hand."""
        self._layers_write = False  # some layer has asked where to write its gradient
        self.produced_gradient = [False] * count
        """Which parameters got a gradient since main grads were empty."""
        self._set_aside: tuple[GradientState, torch.Tensor] | None = None
        self.set_cadence(cadence)

    # -- what is held -------------------------------------------------------------------------

    @property
    def has_local(self) -> bool:
        """Whether this rank holds gradients that were not yet summed over ranks."""
        return self._local is not None or bool(self._of_spans)

    @property
    def is_waiting(self) -> bool:
        """Whether gradients are held that are not summed over ranks, or not all of them."""
        return self._local is not None or self.state is GradientState.PARTIAL

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is held at all."""
        return self._local is None and self.state is GradientState.EMPTY

    @property
    def at_risk(self) -> bool:
        """Whether a backward that has not ended has (or may have) added to earlier gradients."""
        return self._backward is BackwardPhase.MIXED

    @property
    def is_kept_apart(self) -> bool:
        """Whether there are gradients that who writes to main grads does not reach."""
        outside = self.state is GradientState.PARTIAL and not self._sum.sums_in_main
        if outside or self._set_aside is not None:
            return True
        return self._local is not None and self._local.data_ptr() != self.main.data.data_ptr()

    @property
    def _main_holds_sums(self) -> bool:
        """Whether main grads hold gradients, final or not yet."""
        sums = self.state is GradientState.PARTIAL and self._sum.sums_in_main
        return sums or self.state.is_final

    @property
    def squares(self) -> Squares | None:
        """Sum of squares of final main grads, if their reduction has found it by the way.

        Reductions look for it from the first time that somebody asks.
        """
        self._sum.finds_squares = True
        return self._sum.squares if self.state.is_final else None

    # -- how gradients are summed -------------------------------------------------------------

    def set_cadence(self, cadence: Cadence) -> None:
        """Choose when `reduce` will be called. Raises RuntimeError while gradients are held."""
        self._refuse_held("how often they are summed")
        self.cadence = cadence
        wire = self.dtypes.wire
        self.sum_dtype = self.dtypes.grads if cadence is Cadence.ONCE else wire
        """What a rank adds its own gradients in."""
        # What it may keep one in that nothing is added to.
        self._narrow_dtype = min(self.sum_dtype, wire, key=lambda dtype: dtype.itemsize)

    def set_sum(self, make: RankSumFactory, scale: float | None) -> None:
        """Choose how `reduce` sums, and the factor. Raises like `set_cadence`."""
        self._refuse_held("the factor of their sum")
        self._sum = make(self.main, self._sum.axes, scale, self._scratch)

    def forget_squares(self) -> None:
        """Somebody has changed main grads since their reduction."""
        self._sum.squares = None

    def on_final(self, change: Callable[[torch.Tensor], None] | None) -> None:
        """Have `change` called with main grads (flat) that a step's last reduction has made."""
        self._on_final = change

    @property
    def ends_alone(self) -> bool:
        """Whether the end of a reduction begins no further collective, nor a user's code."""
        return self._sum.is_one_collective and self._on_final is None

    def tell_before_buffers(self, hear: Callable[[int], None]) -> None:
        """Call the method `hear` (held weakly) with the bytes of a local buffer to be taken."""
        self._before_buffers = WeakMethod(hear)

    def _refuse_held(self, what: str) -> None:
        if not self.is_empty:
            raise RuntimeError(
                f"gradients of {self.layout.specs[0].name} are being accumulated: choose {what} "
                "before the first backward, or after zero_grad()"
            )

    # -- a backward ---------------------------------------------------------------------------

    def enter_backward(self, last: bool) -> None:
        """A backward begins; `last` is whether it is the step's last one."""
        self.by_layers.clear()
        self._is_last = last
        event = BackwardEvent.BEGAN if self.is_empty else BackwardEvent.BEGAN_BESIDE
        self._backward = self._backward.after(event)

    def end_backward(self) -> None:
        """It has ended, and all that it brought is where it belongs."""
        if self._of_spans:
            self._add_spans()
        self.by_layers.clear()
        self._backward = self._backward.after(BackwardEvent.CLEARED)

    def abandon_backward(self) -> None:
        """It has raised: forget what it brought, unless that is mixed with what was held before."""
        self._of_spans.clear()
        if self._backward in (BackwardPhase.IDLE, BackwardPhase.ALONE):
            self._close_local()
        self._backward = self._backward.after(BackwardEvent.RAISED)

    def accumulate(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient, as autograd produced it (one read, one write)."""
        if self._backward is BackwardPhase.BESIDE:
            self._backward = self._backward.after(BackwardEvent.ADDED)
        if self._in_local[index]:
            self._widen()
            self.view(index).add_(gradient)
            return
        if self._local is None and self._is_last and not self._layers_write:
            # The only gradients of this step, most likely: put them where they are sent from.
            self._open(self._narrow_dtype)
        self.view(index).copy_(gradient)
        self._in_local[index] = True

    def accumulate_span(self, index: int, gradient: ShardedTensor, ranks: int) -> None:
        """Add the gradient that a main parameter got of which each rank has a span.

        The gradient of a span is the mean over ranks (Note [Gradients of a span] in
        `lamina.buffers.tensors.span_ops`), and reductions sum. So the span goes into the local
        buffer times the number of ranks, and the reduction brings it to its rank among zeros. It
        waits beside the buffer until that is needed: a penalty over all parameters comes to all
        units at once, and would open the whole model's buffers.
        """
        added = gradient.to_local() * ranks
        if index in self._of_spans:
            added += self._of_spans[index][2]
        self._of_spans[index] = (gradient.start, gradient.stop, added)

    def _add_spans(self) -> None:
        """Put what `accumulate_span` has kept into the local buffer."""
        if self._backward is BackwardPhase.BESIDE:
            self._backward = self._backward.after(BackwardEvent.ADDED)
        for index, (start, stop, added) in self._of_spans.items():
            self._widen()
            view = self.view(index)
            if not self._in_local[index]:
                view.zero_()
                self._in_local[index] = True
            view.view(-1)[start:stop].add_(added)
        self._of_spans.clear()

    def view(self, index: int) -> torch.Tensor:
        """One parameter's gradient in the local buffer, shaped like the parameter."""
        local = self._local if self._local is not None else self._open()
        start, stop, shape = self._spans[index]
        return local[start:stop].view(shape)

    def is_local(self, index: int) -> bool:
        """Whether `view` of that parameter holds a gradient; if not, its bytes mean nothing."""
        return self._in_local[index]

    def view_for_layer(self, index: int) -> torch.Tensor:
        """The same as `view`, for a layer that writes or adds its gradient there itself."""
        self._layers_write = True
        if self._backward is BackwardPhase.BESIDE:
            self._backward = self._backward.after(BackwardEvent.ADDED)
        self._widen()
        return self.view(index)

    def adopt(self, index: int, gradient: torch.Tensor) -> bool:
        """Make a layer's own gradient the local buffer, if it is all that the buffer will hold."""
        alone = gradient.numel() == self.layout.size and gradient.is_contiguous()
        alone = alone and gradient.untyped_storage().nbytes() == gradient.nbytes
        fits = gradient.dtype == self.sum_dtype and not self.accumulates_in_main
        if self._local is not None or self._of_spans or not (alone and fits):
            return False
        if self._backward is BackwardPhase.BESIDE:
            self._backward = self._backward.after(BackwardEvent.ADDED)
        if self._before_buffers is not None and (hear := self._before_buffers()) is not None:
            hear(gradient.nbytes)
        self._local = gradient.view(-1)
        self._adopted.add(gradient.data_ptr())
        return True

    def written_by_layer(self, index: int) -> None:
        """A layer has written its gradient: autograd will bring none in this backward."""
        self._in_local[index] = True
        self.by_layers.add(index)

    # -- what users and `finalize_grads` do to gradients --------------------------------------

    def discard(self) -> None:
        """Forget everything: gradients were zeroed, or a backward died half-way."""
        self._close_local()
        self._sum.forget()
        self._set_aside = None
        self.state = self.state.after(GradientEvent.DROPPED)
        self._backward = self._backward.after(BackwardEvent.CLEARED)
        self.produced_gradient = [False] * len(self.produced_gradient)

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient, where it is not part of sums that are kept apart."""
        if self._main_holds_sums:
            self.main.span_view(index).zero_()
            self.produced_gradient[index] = False
        self._in_local[index] = False

    def mark_zeroed(self) -> None:
        """Final main grads are zeros: whatever was final of them may be made final again."""
        self.state = self.state.after(GradientEvent.ZEROED)

    def zero_if_empty(self) -> None:
        """Make main grads zeros where nothing was reduced: somebody is about to add to them."""
        if self.state is GradientState.EMPTY:
            self.main.data.zero_()
            self.state = self.state.after(GradientEvent.ZEROED)

    def mark_finalized(self) -> None:
        """`finalize_grads` has been over what main grads hold."""
        self.state = self.state.after(GradientEvent.FINALIZED)

    def mark_produced(self, flags: Sequence[bool]) -> None:
        """Say for each parameter whether it has a gradient."""
        self.produced_gradient = list(flags)

    def clear_placeholders(self) -> None:
        """Put zeros where main grads hold nothing yet: somebody may look at them early.

        Negative ones where gradients are kept apart; see Note [Zeros that tell zeroing] in
        `lamina.ddp.group.shown`.
        """
        if not self.is_kept_apart:
            for index, written in enumerate(self._in_local if self.has_local else ()):
                if not written:
                    self.view(index).zero_()
        elif not self._main_holds_sums:
            self.main.data.fill_(-0.0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients, those not yet summed over ranks included."""
        main = self.main.data if self.state is not GradientState.EMPTY else None
        aside = self._set_aside[1] if self._set_aside is not None else None
        for tensor in (main, self._local, aside):
            if tensor is not None:
                tensor.mul_(factor)
        self._sum.squares = None
        self._sum.scale_kept(factor)

    # -- the sum over ranks -------------------------------------------------------------------

    def skip(self, final: bool) -> None:
        """No rank had gradients for this group in a microbatch that was reduced."""
        self._sum.skip(final)

    def reduce(self, final: bool) -> Iterator[Handle]:
        """Sum over ranks: a generator that yields each collective's handle to be waited for.

        Note [Reductions are generators]
            A sum over two axes is two collectives, and the second one sends what the first has
            received. A generator lets the caller go on with backward in between: it runs up to a
            collective, yields its handle, and is resumed when somebody waits for it. What comes
            after the last collective (scaling, giving buffers back) runs at that time too. So a
            reduction that was not drained has not happened, although its state says FINAL.

        Args:
            final: whether this is the step's last microbatch: then the outer axis is summed too
                and the scale applied.
        """
        if self._backward is BackwardPhase.BESIDE:
            self._backward = self._backward.after(BackwardEvent.ADDED)
        local = self._sealed_local()
        self.produced_gradient = list(map(or_, self.produced_gradient, self._in_local))
        adds = final and self._sum.adds_to_final and self._on_final is None
        if self.state.is_final and not adds:
            self._set_aside = (self.state, self.main.data.clone())
            self.state = self.state.after(GradientEvent.SET_ASIDE)
        before = self.state
        event = GradientEvent.COMPLETED if final else GradientEvent.SUMMED
        self.state = self.state.after(event)
        # From here on the buffer belongs to the collective: a gradient that comes later opens
        # another one.
        self._forget_local()
        wire = self._to_wire(local)
        yield from self._sum.run(wire, before, final)
        if final:
            self._complete()
        self._give_back(wire)
        if local is not wire:
            self._give_back(local)

    def _complete(self) -> None:
        """The step's last sum is in main grads: what users want done to it, and earlier ones."""
        if self._on_final is not None:
            self._on_final(self.main.data)
            self._sum.squares = None
        if self._set_aside is not None:
            state, earlier = self._set_aside
            self.main.data.add_(earlier)
            self._set_aside = self._sum.squares = None
            if state is GradientState.FINALIZED:
                self.state = self.state.after(GradientEvent.FINALIZED)

    def _to_wire(self, local: torch.Tensor) -> torch.Tensor:
        if local.dtype == self.dtypes.wire:
            return local
        wire = self._scratch.take(local.numel(), self.dtypes.wire, local.device)
        return wire.copy_(local)

    # -- the local buffer ---------------------------------------------------------------------

    def _widen(self) -> None:
        """Something is to be added: a buffer in the wire dtype becomes one in the dtype of sums."""
        narrow = self._local
        if narrow is None or narrow.dtype == self.sum_dtype:
            return
        self._open(self.sum_dtype).copy_(narrow)
        self._give_back(narrow)

    def _open(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Make the local buffer. Where main grads are whole and empty, it is their storage."""
        dtype = dtype or self.sum_dtype
        aliases = (
            self.accumulates_in_main
            and dtype == self.main.dtype
            and self._sum.device == self.main.device
            and self.state is GradientState.EMPTY
        )
        if aliases:
            self._local = self.main.data
        else:
            if self._before_buffers is not None and (hear := self._before_buffers()) is not None:
                hear(self.layout.size * dtype.itemsize)
            self._local = self._scratch.take(self.layout.size, dtype, self._sum.device)
        return self._local

    def _sealed_local(self) -> torch.Tensor:
        """The local buffer with zeros wherever no gradient was written, padding included."""
        if self._of_spans:
            self._add_spans()
        local = self._local if self._local is not None else self._open()
        for start, stop in self._padding:
            local[start:stop].zero_()
        for index, written in enumerate(self._in_local):
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
        self._of_spans.clear()
        self._in_local = [False] * len(self._in_local)

    def _give_back(self, buffer: torch.Tensor) -> None:
        address = buffer.data_ptr()
        if address in self._adopted:  # nobody takes it again, as the next one is adopted too
            self._adopted.remove(address)
            return
        if self.main.has_memory and address == self.main.data.data_ptr():
            return
        self._scratch.give(buffer)
