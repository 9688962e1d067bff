"""Gradients of one group: accumulated into a flat buffer, summed over ranks, kept as main grads.

Two buffers take part. `LocalGradients` holds this rank's own gradients of the whole group. Main
grads hold what the optimizer reads, where the strategy's placement says. Both are one storage
where main grads are whole, of the dtype that this rank adds in, and hold nothing that was reduced.
A gradient that nothing is added to is kept in the wire dtype, so that it is copied once; the first
addition replaces that buffer by one in the dtype of sums.

A `RankSum` brings one to the other. `AxisSum` does it with one collective (an ordered one, or the
backend's own); those of several are in `lamina.ddp.gradients.reduction`.

A reduced gradient is never reduced again: once main grads are final, what a further backward
brings is summed apart and then added.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from operator import or_
from typing import Any

import torch

from lamina.buffers import BufferLayout, FlatBuffer, ShardedTensor
from lamina.buffers.engine import ScratchBuffers
from lamina.collectives import Handle
from lamina.collectives.engine import GradientCodec, Reduction
from lamina.ddp.compat import foreach_copy
from lamina.ddp.gradients.states import (
    COMPLETED,
    FINAL,
    FINALIZED,
    SET_ASIDE,
    SUMMED,
    ZEROED,
    BackwardPhase,
    GradientState,
)
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.dtypes import GroupDtypes
from lamina.ddp.parameters.strategy import Cadence
from lamina.mesh.engine import MeshAxis


@dataclass(frozen=True)
class Squares:
    """The sum of squares that a reduction found in what it stored.

    It is `value`, fp64 without dimensions. `pieces` says whether the ranks along (outer, inner)
    found it in different pieces; where not, all of them found the same.
    """

    value: torch.Tensor
    pieces: tuple[bool, bool]


_PARTS_TO_COPY = 8
"""Of a group's bytes: at most one of them waits to be copied."""

SumSteps = Generator[Handle, None, Squares | None]
"""Yields the handles of a sum's collectives to be waited for, and returns its squares."""


class RankSum(ABC):
    """Sums one group's gradients over ranks into its main grads.

    `scale` is the factor of the whole sum, applied once to it; None for none.
    """

    sums_in_main = False
    """Whether sums of microbatches are in main grads before the last one."""
    adds_to_final = False
    """Whether a reduction may add to main grads that are final already."""
    is_one_collective = False
    """Whether `run` yields one handle at most."""

    def __init__(
        self,
        main: FlatBuffer,
        axes: DataParallelAxes,
        scale: float | None,
        scratch: ScratchBuffers,
    ) -> None:
        self.main = main
        self.axes = axes
        self.scale = scale
        self.scratch = scratch
        self.device = main.device
        """Where a rank's own gradients lie: that of main grads, unless those are kept elsewhere."""
        self.outer_sharded, self.inner_sharded = main.cuts

    @abstractmethod
    def run(self, wire: torch.Tensor, before: GradientState, final: bool, finds: bool) -> SumSteps:
        """Sum `wire` (flat, the whole group) over ranks.

        `wire` is unchanged until the generator ends. `before` is what main grads hold: FINAL only
        where `adds_to_final`. The last microbatch of a step is `final`. With `finds`, a sum that
        can tell the squares of what it stored by the way returns them.
        """

    # What follows is nothing where sums of microbatches are in main grads.

    def skip(self, final: bool) -> None:  # noqa: B027
        """A microbatch in which no rank had gradients for this group."""

    def forget(self) -> None:  # noqa: B027
        """Drop sums of microbatches that are kept outside main grads."""

    def scale_kept(self, factor: float) -> None:  # noqa: B027
        """Multiply sums of microbatches that are kept outside main grads."""


RankSumFactory = Callable[[FlatBuffer, DataParallelAxes, float | None, ScratchBuffers], RankSum]


class AxisSum(RankSum):
    """Only the inner axis: one collective, with the scale in it where the sum is complete.

    `prepare` makes the reduction of two buffers. `codec_of` gives the codec of what an ordered sum
    sends, by the buffer and whether it holds gradients of this rank alone, and no sums over an
    axis; None sends it as it is.
    """

    sums_in_main = True
    adds_to_final = True
    is_one_collective = True

    def __init__(
        self,
        prepare: Callable[..., Reduction],
        codec_of: Callable[[torch.Tensor, bool], GradientCodec | None] | None,
        *state: Any,
    ) -> None:
        super().__init__(*state)
        self._prepare, self._codec_of = prepare, codec_of
        self._prepared: dict[str, Reduction] = {}

    def _along(
        self,
        axis: MeshAxis,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        scatter: bool,
        own: bool = True,
    ) -> Reduction:
        """The reduction along an axis, a reduce-scatter or an all-reduce, prepared at first use."""
        reduction = self._prepared.get(axis.name)
        if reduction is None or not reduction.fits(output, input):
            codec = None
            if self._codec_of is not None and axis.size > 1:  # one rank alone sends nothing
                codec = self._codec_of(input, own)
            group = axis.sibling("reduce")
            reduction = self._prepare(output, input, group, scatter=scatter, codec=codec)
            self._prepared[axis.name] = reduction
        return reduction

    def run(self, wire: torch.Tensor, before: GradientState, final: bool, finds: bool) -> SumSteps:
        """One reduce-scatter, or one all-reduce where main grads are whole."""
        # With sums of earlier microbatches in main grads, the scale has to wait until the last
        # one is added: law 2 scales the whole sum once.
        fused = final and before is not GradientState.PARTIAL
        main = self.main.data
        reduction = self._along(self.axes.inner, main, wire, scatter=self.inner_sharded)
        handle = reduction.start(
            main,
            wire,
            scale=self.scale if fused else None,
            accumulate=before is not GradientState.EMPTY,
            statistics=finds,
        )
        yield handle
        if final and not fused and self.scale is not None:
            main.mul_(self.scale)
            return None  # the squares are of what was stored before
        if not (final and finds):
            return None
        return Squares(handle.squared_norm, (False, self.inner_sharded or reduction.piecewise))


class _Copies:
    """Copies of gradients to their places that are still to be made.

    Note [Gradients are copied together]
        On a GPU a copy is a launch, and a block has as many small gradients as large ones. So what
        autograd brings waits, and one launch copies all that has come. It waits until the unit is
        reduced, or until more than `limit` bytes wait, which bounds what is held twice. On a CPU a
        gradient is copied at once, while it is in cache.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Make none of them."""
        self._destinations: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        self._nbytes = 0

    def add(self, destination: torch.Tensor, gradient: torch.Tensor) -> None:
        """Copy a gradient, now or before `make` returns."""
        self._destinations.append(destination)
        self._gradients.append(gradient)
        self._nbytes += gradient.nbytes
        if self._nbytes > self._limit:
            self.make()

    def make(self) -> None:
        """Make all of them."""
        if self._destinations:
            foreach_copy(self._destinations, self._gradients)
            self.forget()


class LocalGradients:
    """This rank's own gradients of a group, from autograd until a reduction sends them.

    They lie in one flat buffer, at their parameters' places in the weights. The first gradient
    opens the buffer, and `hand_over` gives it to a reduction, so that what comes later opens
    another one. Gradients of spans wait beside it.

    Note [What a gradient is added in]
        Mostly a parameter gets one gradient in a step, and to that nothing is added. So it is put
        where it is sent from, in the wire dtype: one read, one write. If there may be more (the
        backward is not the step's last one, or layers add to the buffer themselves), the buffer is
        in the dtype of sums from the beginning. A second gradient that nobody expected (a module
        that runs twice) turns a buffer in the wire dtype into one in the dtype of sums.
    """

    def __init__(self, group: GroupGradients) -> None:
        self._group: GroupGradients = weakref.proxy(group)  # the group holds this object
        layout = group.layout
        self._spans = [
            (offset, offset + spec.numel, spec.shape)
            for offset, spec in zip(layout.offsets, layout.specs, strict=True)
        ]
        self._padding = list(layout.padding_ranges())
        self.buffer: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []
        self.written = [False] * len(self._spans)
        """Which parameters have a gradient in the buffer; of others its bytes mean nothing."""
        self._copies = _Copies(group.wire_bytes // _PARTS_TO_COPY)
        # Gradients of spans that belong into the buffer as soon as there has to be one: elements
        # (start, stop) of the parameter, and the gradient.
        self._of_spans: dict[int, tuple[int, int, torch.Tensor]] = {}
        self.by_layers: set[int] = set()
        """Parameters whose gradient a layer has written in the backward at hand."""
        self._layers_write = False  # some layer has asked where to write its gradient
        self._adopted: set[tuple[int, int]] = set()  # starts of buffers that layers gave
        self._is_last = False  # the backward at hand is the step's last one, as far as is known
        self.phase = BackwardPhase.IDLE
        """What a backward that raises now would spoil."""
        self._before_buffers: weakref.WeakMethod[Callable[[int], None]] | None = None

    @property
    def exist(self) -> bool:
        """Whether this rank holds gradients that were not yet summed over ranks."""
        return self.buffer is not None or bool(self._of_spans)

    def tell_before_buffers(self, hear: Callable[[int], None]) -> None:
        """Call the method `hear` (held weakly) with the bytes of a buffer to be taken."""
        self._before_buffers = weakref.WeakMethod(hear)

    # -- a backward ---------------------------------------------------------------------------

    def begin_backward(self, last: bool) -> None:
        """A backward begins; `last` is whether it is the step's last one."""
        self.by_layers.clear()
        self._is_last = last
        self.phase = BackwardPhase.ALONE if self._group.is_empty else BackwardPhase.BESIDE

    def end_backward(self) -> None:
        """It has ended, and all that it brought is where it belongs."""
        if self._of_spans:
            self._add_spans()
        self._copies.make()
        self.by_layers.clear()
        self.phase = BackwardPhase.IDLE

    def abandon_backward(self) -> None:
        """It has raised: forget what it brought, unless that is mixed with what was held before."""
        self._of_spans.clear()
        if self.phase in (BackwardPhase.IDLE, BackwardPhase.ALONE):
            self.close()
        if self.phase is not BackwardPhase.MIXED:
            self.phase = BackwardPhase.IDLE

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add one parameter's gradient, as autograd produced it (one read, one write)."""
        if self.phase is BackwardPhase.BESIDE:
            self._mix()
        if self.written[index]:
            self._widen()
            self._views[index].add_(gradient)
            return
        if self.buffer is None:
            # See Note [What a gradient is added in].
            sums, wire = self._group.sum_dtype, self._group.dtypes.wire
            narrow = self._is_last and not self._layers_write and wire.itemsize < sums.itemsize
            self._open(wire if narrow else sums)
        view, self.written[index] = self._views[index], True
        # Between backwards nothing would end the wait. See Note [Gradients are copied together].
        if view.is_cuda and self.phase is not BackwardPhase.IDLE:
            self._copies.add(view, gradient)
        else:
            view.copy_(gradient)

    def add_span(self, index: int, gradient: ShardedTensor, ranks: int) -> None:
        """Add the gradient that a main parameter got of which each rank has a span.

        The gradient of a span is the mean over ranks (Note [Gradients of a span] in
        `lamina.buffers.tensors.span_ops`), and reductions sum. So the span goes into the buffer
        times the number of ranks, and the reduction brings it to its rank among zeros. It waits
        beside the buffer until that is needed: a penalty over all parameters comes to all units at
        once, and would open the whole model's buffers.
        """
        added = gradient.to_local() * ranks
        if index in self._of_spans:
            added += self._of_spans[index][2]
        self._of_spans[index] = (gradient.start, gradient.stop, added)

    def _add_spans(self) -> None:
        """Put what `add_span` has kept into the buffer."""
        self._mix()
        for index, (start, stop, added) in self._of_spans.items():
            # Each rank sends zeros for the spans of the others.
            self._widen()
            view = self.view(index)
            if not self.written[index]:
                view.zero_()
                self.written[index] = True
            view.view(-1)[start:stop].add_(added)
        self._of_spans.clear()

    def _mix(self) -> None:
        """The backward at hand adds to the group; see the Note in `lamina.ddp.gradients.states`."""
        if self.phase is BackwardPhase.BESIDE:
            self.phase = BackwardPhase.MIXED

    # -- layers that write their gradients themselves -----------------------------------------

    def view_for_layer(self, index: int) -> torch.Tensor:
        """The same as `view`, for a layer that writes or adds its gradient there itself."""
        self._layers_write = True
        self._mix()
        self._widen()
        return self.view(index)

    def adopt(self, index: int, gradient: torch.Tensor) -> bool:
        """Make a layer's own gradient the buffer, if it is all that the buffer will hold."""
        group = self._group
        # A view would keep alive what it is a view of, and other tensors may lie there too.
        alone = gradient.numel() == group.layout.size and gradient.is_contiguous()
        alone = alone and gradient.untyped_storage().nbytes() == gradient.nbytes
        fits = gradient.dtype == group.sum_dtype and not group.accumulates_in_main
        if self.exist or not (alone and fits):
            return False
        self._mix()
        self._announce(gradient.nbytes)
        self._lie_in(gradient.view(-1))
        self._adopted.add(_start_of(gradient))
        return True

    def written_by_layer(self, index: int) -> None:
        """A layer has written its gradient: autograd will bring none in this backward."""
        self.written[index] = True
        self.by_layers.add(index)

    # -- the buffer ---------------------------------------------------------------------------

    def view(self, index: int) -> torch.Tensor:
        """One parameter's gradient in the buffer, shaped like the parameter."""
        if self.buffer is None:
            self._open(self._group.sum_dtype)
        self._copies.make()  # whoever asks may read it
        return self._views[index]

    def _open(self, dtype: torch.dtype) -> torch.Tensor:
        """Make the buffer. Where main grads are whole and empty, it is their storage."""
        group, main = self._group, self._group.main
        device = group.rank_sum.device
        # What was reduced is never reduced again, so only empty main grads may be added to.
        aliases = (
            group.accumulates_in_main
            and group.state is GradientState.EMPTY
            and (dtype, device) == (main.dtype, main.device)
        )
        if aliases:
            return self._lie_in(main.data)
        size = group.layout.size
        self._announce(size * dtype.itemsize)
        return self._lie_in(group.rank_sum.scratch.take(size, dtype, device))

    def _announce(self, nbytes: int) -> None:
        """A buffer is about to be taken: others may have to end first."""
        if self._before_buffers is not None and (hear := self._before_buffers()) is not None:
            hear(nbytes)

    def _lie_in(self, buffer: torch.Tensor) -> torch.Tensor:
        self.buffer = buffer
        self._views = [buffer[start:stop].view(shape) for start, stop, shape in self._spans]
        return buffer

    def _widen(self) -> None:
        """Something is to be added: a buffer in the wire dtype becomes one in the dtype of sums."""
        self._copies.make()
        narrow, dtype = self.buffer, self._group.sum_dtype
        if narrow is not None and narrow.dtype != dtype:
            self._open(dtype).copy_(narrow)
            self.give_back(narrow)

    def hand_over(self) -> tuple[torch.Tensor, list[bool]]:
        """Give the buffer to a reduction, and say which parameters have a gradient in it.

        It has zeros wherever no gradient was written, padding included. From here on it belongs to
        the collective: a gradient that comes later opens another one.
        """
        self._mix()
        if self._of_spans:
            self._add_spans()
        self._copies.make()
        # A rank without gradients takes part as well, with zeros.
        buffer = self.buffer if self.buffer is not None else self._open(self._group.sum_dtype)
        for start, stop in self._padding:
            buffer[start:stop].zero_()
        self.clear_unwritten()
        written = self.written
        self._forget()
        return buffer, written

    def clear_unwritten(self) -> None:
        """Put zeros where no gradient was written."""
        for index, written in enumerate(self.written):
            if not written:
                self.view(index).zero_()

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient."""
        self._copies.make()  # not after its place was taken for empty
        self.written[index] = False

    def discard(self) -> None:
        """Forget all gradients, and whatever a backward that raised has left among them."""
        self.close()
        self.phase = BackwardPhase.IDLE

    def close(self) -> None:
        """Forget the gradients, and give the buffer back."""
        buffer = self.buffer
        self._forget()
        if buffer is not None:
            self.give_back(buffer)

    def _forget(self) -> None:
        self.buffer, self._views = None, []
        self._copies.forget()
        self._of_spans.clear()
        self.written = [False] * len(self._spans)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads a buffer any more that was opened here, or taken beside it."""
        start, main = _start_of(buffer), self._group.main
        if start in self._adopted:  # nobody takes it again, as the next one is adopted too
            self._adopted.remove(start)
        elif not (main.has_memory and start == _start_of(main.data)):
            self._group.rank_sum.scratch.give(buffer)


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
        self.rank_sum = rank_sum
        """How they are summed over ranks."""
        self._on_final: Callable[[torch.Tensor], None] | None = None
        self.state = GradientState.EMPTY
        """What main grads hold."""
        self.produced_gradient = [False] * len(layout.specs)
        """Which parameters got a gradient since main grads were empty."""
        self._set_aside: tuple[GradientState, torch.Tensor] | None = None
        self._squares: Squares | None = None  # of the newest final reduction
        self._finds_squares = False  # a little time in each reduction, for who clips by the norm
        self.local = LocalGradients(self)
        """What was not yet summed over ranks."""
        self.set_cadence(cadence)

    # -- what is held -------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        """Whether gradients are held that are not summed over ranks, or not all of them."""
        return self.local.buffer is not None or self.state is GradientState.PARTIAL

    @property
    def is_empty(self) -> bool:
        """Whether no gradient is held at all."""
        return self.local.buffer is None and self.state is GradientState.EMPTY

    @property
    def at_risk(self) -> bool:
        """Whether a backward that has not ended has (or may have) added to earlier gradients."""
        return self.local.phase is BackwardPhase.MIXED

    @property
    def is_kept_apart(self) -> bool:
        """Whether there are gradients that who writes to main grads does not reach."""
        outside = self.state is GradientState.PARTIAL and not self.rank_sum.sums_in_main
        if outside or self._set_aside is not None:
            return True
        buffer = self.local.buffer
        return buffer is not None and _start_of(buffer) != _start_of(self.main.data)

    @property
    def _main_holds_sums(self) -> bool:
        """Whether main grads hold gradients, final or not yet."""
        sums = self.state is GradientState.PARTIAL and self.rank_sum.sums_in_main
        return sums or self.state in FINAL

    @property
    def squares(self) -> Squares | None:
        """Sum of squares of final main grads, if their reduction has found it by the way.

        Reductions look for it from the first time that somebody asks.
        """
        self._finds_squares = True
        return self._squares if self.state in FINAL else None

    def forget_squares(self) -> None:
        """Somebody has changed main grads since their reduction."""
        self._squares = None

    # -- how gradients are summed -------------------------------------------------------------

    def set_cadence(self, cadence: Cadence) -> None:
        """Choose when `reduce` will be called. Raises RuntimeError while gradients are held."""
        self._refuse_held("how often they are summed")
        self.cadence = cadence
        once = cadence is Cadence.ONCE
        self.sum_dtype = self.dtypes.grads if once else self.dtypes.wire
        """What a rank adds its own gradients in."""

    def set_sum(self, make: RankSumFactory, scale: float | None) -> None:
        """Choose how `reduce` sums, and the factor. Raises like `set_cadence`."""
        self._refuse_held("the factor of their sum")
        self.rank_sum = make(self.main, self.rank_sum.axes, scale, self.rank_sum.scratch)

    def on_final(self, change: Callable[[torch.Tensor], None] | None) -> None:
        """Have `change` called with main grads (flat) that a step's last reduction has made."""
        self._on_final = change

    @property
    def ends_alone(self) -> bool:
        """Whether the end of a reduction begins no further collective, nor a user's code."""
        return self.rank_sum.is_one_collective and self._on_final is None

    def _refuse_held(self, what: str) -> None:
        if not self.is_empty:
            raise RuntimeError(
                f"gradients of {self.layout.specs[0].name} are being accumulated: choose {what} "
                "before the first backward, or after zero_grad()"
            )

    # -- what users and `finalize_grads` do to gradients --------------------------------------

    def discard(self) -> None:
        """Forget everything: gradients were zeroed, or a backward died half-way."""
        self.local.discard()
        self.rank_sum.forget()
        self._set_aside = None
        self.state = GradientState.EMPTY
        self.produced_gradient = [False] * len(self.produced_gradient)

    def drop(self, index: int) -> None:
        """Forget one parameter's gradient, where it is not part of sums that are kept apart."""
        if self._main_holds_sums:
            self.main.span_view(index).zero_()
            self.produced_gradient[index] = False
        self.local.drop(index)

    def mark_zeroed(self) -> None:
        """Final main grads are zeros: whatever was final of them may be made final again."""
        self.state = ZEROED[self.state]

    def zero_if_empty(self) -> None:
        """Make main grads zeros where nothing was reduced: somebody is about to add to them."""
        if self.state is GradientState.EMPTY:
            self.main.data.zero_()
            self.mark_zeroed()

    def mark_finalized(self) -> None:
        """`finalize_grads` has been over what main grads hold."""
        self.state = FINALIZED[self.state]

    def mark_produced(self, flags: Sequence[bool]) -> None:
        """Say for each parameter whether it has a gradient."""
        self.produced_gradient = list(flags)

    def clear_placeholders(self) -> None:
        """Put zeros where main grads hold nothing yet: somebody may look at them early.

        Negative ones where gradients are kept apart; see Note [Zeros that tell zeroing] in
        `lamina.ddp.group.shown`.
        """
        if not self.is_kept_apart:
            if self.local.exist:
                self.local.clear_unwritten()
        elif not self._main_holds_sums:
            self.main.data.fill_(-0.0)

    def scale(self, factor: float) -> None:
        """Multiply all gradients, those not yet summed over ranks included."""
        main = self.main.data if self.state is not GradientState.EMPTY else None
        aside = self._set_aside[1] if self._set_aside is not None else None
        for tensor in (main, self.local.buffer, aside):
            if tensor is not None:
                tensor.mul_(factor)
        self._squares = None
        self.rank_sum.scale_kept(factor)

    # -- the sum over ranks -------------------------------------------------------------------

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
        local, written = self.local.hand_over()
        self.produced_gradient = list(map(or_, self.produced_gradient, written))
        # Final main grads are not reduced again. A sum that can add to them as it is stored does
        # so, unless the user's hook is to see what this reduction has brought, and nothing else.
        adds = final and self.rank_sum.adds_to_final and self._on_final is None
        if self.state in FINAL and not adds:
            self._set_aside = (self.state, self.main.data.clone())
            self.state = SET_ASIDE[self.state]
        before = self.state
        self.state = (COMPLETED if final else SUMMED)[before]
        wire = local
        if local.dtype != self.dtypes.wire:
            wire = self.rank_sum.scratch.take(local.numel(), self.dtypes.wire, local.device)
            wire.copy_(local)
        self._squares = yield from self.rank_sum.run(wire, before, final, self._finds_squares)
        if final:
            self._complete()
        # Nobody reads what was sent any longer.
        self.local.give_back(wire)
        if local is not wire:
            self.local.give_back(local)

    def _complete(self) -> None:
        """The step's last sum is in main grads: what users want done to it, and earlier ones."""
        if self._on_final is not None:
            self._on_final(self.main.data)
            self._squares = None
        if self._set_aside is not None:
            state, earlier = self._set_aside
            self.main.data.add_(earlier)
            self._set_aside = self._squares = None
            if state is GradientState.FINALIZED:
                self.mark_finalized()


def _start_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor begins: its storage and the offset in it. On meta all addresses are 0."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())
