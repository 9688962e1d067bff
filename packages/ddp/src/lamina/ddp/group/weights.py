"""Model weights of a group: what a rank keeps, and how the whole comes back before compute.

`Weights` holds the part that does not depend on where the weights live: installing what the
optimizer wrote, and the state machine of one gather. `WholeWeights` keeps them whole on every
rank (strategies 0 to 2); `lamina.fsdp` adds the class that gathers and releases.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto

import torch

from lamina.buffers import FlatBuffer
from lamina.collectives import Handle, all_gather_into
from lamina.collectives.engine import AllGather, Serving
from lamina.ddp.parameters.axes import DataParallelAxes

__all__ = ["Weights", "WeightsState", "WholeWeights", "shares_storage"]


class WeightsState(Enum):
    """Where a group's whole weights are."""

    RELEASED = auto()
    """Not there: views of them must not be read."""
    GATHERING = auto()
    """On their way into their storage."""
    READY = auto()
    """There, and as the optimizer last left them."""


class Weights(ABC):
    """Model weights of one group.

    Args:
        local: what this rank keeps at rest: in the compute dtype, unless gathers cast it.
        axes: data-parallel axes of the group.
    """

    full: torch.Tensor
    """The flat tensor whose views are the parameters; its storage may be released."""

    def __init__(self, local: FlatBuffer, axes: DataParallelAxes) -> None:
        self.local = local
        self.axes = axes
        self.state = WeightsState.RELEASED
        self.kept_for_step = False
        """Whether they stay gathered from their first use in a step until its end."""
        self.main_slice: torch.Tensor | None = None
        """The elements of `local` that main weights are copied to; None where they are the same."""
        self._main: FlatBuffer | None = None
        # Whether main weights are cut along the (outer, inner) axis and `local` is not.
        self._spreads = (False, False)
        self._pending: list[Handle] = []
        self._all_gather: AllGather | None = None
        self._changed = False
        self._written_through = False
        self._purpose = ""

    @property
    def ready(self) -> bool:
        """Whether the whole weights are there and up to date."""
        return self.state is WeightsState.READY

    @property
    def settled(self) -> bool:
        """Whether `local` is what main weights say, and nothing is writing to it."""
        is_main = self.main_slice is None and not any(self._spreads)
        return is_main or (not self._changed and self.state is not WeightsState.GATHERING)

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of the whole weights as a gather brings them."""
        return self.local.layout.size * self.full.itemsize

    @abstractmethod
    def _gather(self) -> Handle | None:
        """Start bringing the whole weights into `full`; None where nothing has to move."""

    @abstractmethod
    def release(self) -> None:
        """Give the whole weights' storage back, where it is not what the rank keeps anyway."""

    @abstractmethod
    def _invalidate(self) -> None:
        """Forget whole weights that no longer are what the main weights say."""

    def _gather_over_inner(self, whole: torch.Tensor, own: torch.Tensor) -> Handle:
        """Start the gather over the inner axis, which is prepared when it is first needed."""
        if self._all_gather is None or not self._all_gather.fits(whole, own):
            self._all_gather = AllGather(whole, own, self.axes.inner.sibling("gather"))
        return self._all_gather.start(whole, own)

    def attach(self, main: FlatBuffer) -> None:
        """Say which buffer the optimizer updates."""
        self._main = main
        outer, inner = (m and not w for m, w in zip(main.cuts, self.local.cuts, strict=True))
        self._spreads = (outer, inner)
        if not shares_storage(main.data, self.local.data):
            self.main_slice = self.local.piece(main.placement)

    def mark_changed(self, *, written: Sequence[str] = ()) -> None:
        """The optimizer (or a load) wrote main weights: the next `start` installs them.

        Args:
            written: names of parameters of which nobody told, but this rank has seen it. If other
                ranks have not written, they do not gather, and the message about the wait has to
                name the cause.
        """
        if written and not self._changed:
            title, names = self.local.layout.title, ", ".join(written[:2])
            self._purpose = f"{title}, whose main parameters this rank has written ({names})"
        self._changed = True
        self._invalidate()

    def written_through(self, everything: bool) -> None:
        """A step has written main weights, and (`everything`) these weights in the same pass."""
        self._written_through = everything and (self._written_through or not self._changed)

    def start(self) -> None:
        """Begin making the whole weights ready; collective, and harmless when they are."""
        if self.state is not WeightsState.RELEASED:
            return
        with Serving(self._purpose or self.local.layout.title):
            if self._changed:
                self._install()
                self._changed = self._written_through = False
            handle = self._gather()
        self._purpose = ""
        self._pending = [] if handle is None else [handle]
        self.state = WeightsState.GATHERING

    def wait(self) -> None:
        """Wait for what `start` began (on a GPU: make the current stream wait)."""
        if self.state is WeightsState.GATHERING:
            for handle in self._pending:
                handle.wait()
            self._pending = []
            self.state = WeightsState.READY

    def _install(self) -> None:
        """Write main weights into this rank's copy and spread it along the outer axis."""
        if self._main is None:
            return
        if self.main_slice is not None and not self._written_through:
            with torch.no_grad():
                self.main_slice.copy_(self._main.data)
        spread_outer, spread_inner = self._spreads
        if spread_outer:
            # The outer axis cuts what the inner one left, so the ranks of an outer group hold
            # neighbouring pieces: one gather in place.
            region = self.local.data
            if spread_inner:
                length = self.local.layout.size // self.axes.inner.size
                begin = self.axes.inner.rank * length
                region = region[begin : begin + length]
            piece = region.numel() // self.axes.outer.size
            own = region[self.axes.outer.rank * piece : (self.axes.outer.rank + 1) * piece]
            all_gather_into(region, own, self.axes.outer.sibling("gather")).wait()


class WholeWeights(Weights):
    """Weights that every rank keeps whole; after a sharded update they are gathered in place."""

    def __init__(self, local: FlatBuffer, axes: DataParallelAxes) -> None:
        super().__init__(local, axes)
        self.full = local.data
        self._spread_inner = False

    def release(self) -> None:
        """Nothing to give back."""

    def _invalidate(self) -> None:
        if self.main_slice is not None or any(self._spreads):
            self.wait()
            self.state = WeightsState.RELEASED

    def _install(self) -> None:
        super()._install()
        _, self._spread_inner = self._spreads

    def _gather(self) -> Handle | None:
        if not self._spread_inner:
            return None
        self._spread_inner = False
        whole = self.local.data
        piece = whole.numel() // self.axes.inner.size
        own = whole[self.axes.inner.rank * piece : (self.axes.inner.rank + 1) * piece]
        return self._gather_over_inner(whole, own)


def shares_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory; released memory too."""
    return bool(first.untyped_storage()._cdata == second.untyped_storage()._cdata)
