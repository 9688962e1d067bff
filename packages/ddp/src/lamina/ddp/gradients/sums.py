"""Sums over one or two data-parallel axes, in the placement of the main grads.

`RankSum` is what a group's gradients need of a reduction; `AxisSum` and `TwoAxisSum` do it with a
pair of collectives (the ordered ones, or the backend's own), `reproducible` does it leaf by leaf.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lamina.buffers import FlatBuffer
from lamina.collectives import Handle, all_gather_into
from lamina.collectives.engine import (
    MESSAGE_BYTES,
    Checksums,
    GradientCodec,
    Reduction,
    ReductionName,
    SumOp,
    reduction_class,
)
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.mesh.engine import MeshAxis

__all__ = ["AxisSum", "Collectives", "RankSum", "Squares", "TwoAxisSum"]


@dataclass(frozen=True)
class Squares:
    """The sum of squares that a reduction found in what it stored.

    It is `value`, fp64 without dimensions. `pieces` says whether the ranks along (outer, inner)
    found it in different pieces; where not, all of them found the same.
    """

    value: torch.Tensor
    pieces: tuple[bool, bool]


class Collectives:
    """The reductions of one sum, each prepared when it is first needed.

    The codec makes of the gradients of a rank what an ordered sum sends. Sums that a further axis
    adds up travel as they are. A backend brings large sums in slices of `message_bytes`.
    """

    def __init__(
        self,
        reduction: ReductionName,
        *,
        average: bool = False,
        codec: GradientCodec | None = None,
        checked: bool = False,
        message_bytes: int = MESSAGE_BYTES,
    ) -> None:
        kind = reduction_class(reduction)
        self._prepare = partial(kind, message_bytes=message_bytes)
        self.piecewise = kind.piecewise
        """Whether an all-reduce's statistics are of this rank's piece, not of the whole."""
        self._op: SumOp = "avg" if average else "sum"
        self._codec, self._checked = codec, checked
        self._prepared: dict[str, Reduction] = {}

    def along(
        self,
        axis: MeshAxis,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        scatter: bool,
        own: bool = True,
    ) -> Reduction:
        """The reduction of such buffers along an axis: a reduce-scatter, or an all-reduce.

        `own` says whether `input` holds gradients of this rank alone, and no sums over an axis.
        """
        found = self._prepared.get(axis.name)
        if found is None or not found.fits(output, input):
            group = axis.sibling("reduce")
            codec = self._codec if own and axis.size > 1 else None
            if self._checked and axis.size > 1:
                codec = Checksums(input.dtype)
            found = self._prepare(output, input, group, scatter=scatter, op=self._op, codec=codec)
            self._prepared[axis.name] = found
        return found


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
        self.squares: Squares | None = None
        """Of the newest final reduction, where it came for free."""
        self.finds_squares = False
        """Whether reductions look for them: a little time, for who clips by the norm."""
        self.outer_sharded, self.inner_sharded = main.cuts

    @abstractmethod
    def run(self, wire: torch.Tensor, before: GradientState, final: bool) -> Iterator[Handle]:
        """Sum `wire` (flat, the whole group) over ranks: yields handles to be waited for.

        `wire` is unchanged until the generator ends. `before` is what main grads hold: FINAL only
        where `adds_to_final`. The last microbatch of a step is `final`.
        """

    # What follows is nothing where sums of microbatches are in main grads.

    def skip(self, final: bool) -> None:  # noqa: B027
        """A microbatch in which no rank had gradients for this group."""

    def forget(self) -> None:  # noqa: B027
        """Drop sums of microbatches that are kept outside main grads."""

    def scale_kept(self, factor: float) -> None:  # noqa: B027
        """Multiply sums of microbatches that are kept outside main grads."""


class AxisSum(RankSum):
    """Only the inner axis: one collective, with the scale in it where the sum is complete."""

    sums_in_main = True
    adds_to_final = True
    is_one_collective = True

    def __init__(self, collectives: Collectives, *state: object) -> None:
        super().__init__(*state)  # type: ignore[arg-type]
        self._collectives = collectives

    def run(self, wire: torch.Tensor, before: GradientState, final: bool) -> Iterator[Handle]:
        """One reduce-scatter, or one all-reduce where main grads are whole."""
        # With sums of earlier microbatches in main grads, the scale has to wait until the last
        # one is added: law 2 scales the whole sum once.
        fused = final and before is not GradientState.PARTIAL
        chosen, finds, main = self._collectives, self.finds_squares, self.main.data
        handle = chosen.along(self.axes.inner, main, wire, scatter=self.inner_sharded).start(
            main,
            wire,
            scale=self.scale if fused else None,
            accumulate=before is not GradientState.EMPTY,
            statistics=finds,
        )
        yield handle
        self.squares = None
        if final and not fused and self.scale is not None:
            self.main.data.mul_(self.scale)
        elif final and finds:
            piece = self.inner_sharded or chosen.piecewise
            self.squares = Squares(handle.squared_norm, (False, piece))


class TwoAxisSum(RankSum):
    """The inner axis at every call, into a buffer apart; the outer one in fp32 at the last."""

    def __init__(self, collectives: Collectives, *state: object) -> None:
        super().__init__(*state)  # type: ignore[arg-type]
        self._collectives = collectives
        self._partial: torch.Tensor | None = None  # sums over the inner axis only

    def run(self, wire: torch.Tensor, before: GradientState, final: bool) -> Iterator[Handle]:
        """Reduce-scatter along the inner axis, then the outer one where the main grads lie."""
        chosen = self._collectives
        whole_inner = self.outer_sharded and not self.inner_sharded
        if self._partial is None:
            pieces = 1 if whole_inner else self.axes.inner.size
            dtype = torch.promote_types(wire.dtype, torch.float32)
            self._partial = self.scratch.take(wire.numel() // pieces, dtype, wire.device)
        partial = self._partial
        inner = chosen.along(self.axes.inner, partial, wire, scatter=not whole_inner)
        adds = before is GradientState.PARTIAL
        yield inner.start(partial, wire, accumulate=adds, statistics=False)
        if final:
            yield from self._over_outer(partial, whole_inner)
            self.forget()

    def _over_outer(self, partial: torch.Tensor, whole_inner: bool) -> Iterator[Handle]:
        chosen = self._collectives
        outer, inner = self.axes.outer, self.axes.inner
        main = own = self.main.data
        if not self.inner_sharded and not self.outer_sharded:
            piece = partial.numel()
            own = main[inner.rank * piece : (inner.rank + 1) * piece]
        finds = self.finds_squares
        over_outer = chosen.along(outer, own, partial, scatter=self.outer_sharded, own=False)
        handle = over_outer.start(own, partial, scale=self.scale, statistics=finds)
        yield handle
        outer_piece = self.outer_sharded or chosen.piecewise
        self.squares = (
            Squares(handle.squared_norm, (outer_piece, not whole_inner)) if finds else None
        )
        if own is not main:
            yield all_gather_into(main, own, inner.sibling("reduce"), async_op=True)

    def forget(self) -> None:
        """Give the buffer of inner sums back."""
        if self._partial is not None:
            self.scratch.give(self._partial)
        self._partial = None

    def scale_kept(self, factor: float) -> None:
        """Multiply the inner sums."""
        if self._partial is not None:
            self._partial.mul_(factor)
