"""Model weights of a group: what a rank keeps, and how the whole comes back before compute.

`Weights` holds the part that does not depend on where the weights live: installing what the
optimizer wrote, and the state machine of one gather. `WholeWeights` keeps them whole on every
rank (strategies 0 to 2); `lamina.fsdp` adds the class that gathers and releases. `Writes` sees who
has written parameters outside of an optimizer's step.

Note [Writes on some ranks only]
    A replica stays one as long as all ranks write the same. A rank sees its own writes wherever the
    engine looks anyway, and notes them until the ranks compare them, in a message that is sent in
    any case: the digest at the end of a step's last backward. So a write that some ranks have not
    made is an error before the step that would follow. Where a rank holds a parameter whole, the
    values decide: a write that has left equal bits on all ranks (an average that one rank swaps in,
    evaluates and swaps back) is none. See docs/decisions/0426.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from operator import attrgetter

import torch

from lamina.buffers import FlatBuffer
from lamina.collectives import Handle, all_gather_into
from lamina.collectives.engine import AllGather, Serving
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.parameters import ParameterRef, title_of

__all__ = ["Weights", "WeightsState", "WholeWeights", "Writes", "shares_storage"]

_VERSION = attrgetter("_version")


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

    At rest a rank keeps `local`: in the compute dtype, unless gathers cast it.
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
        self.title = ""
        """The name of the group, in records and errors."""

    def belongs_to(self, refs: Sequence[ParameterRef]) -> None:
        """Say whose weights these are; said again when the parameters get other names."""
        self.title = title_of(refs)

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

        Nobody told of `written`, which this rank has seen. If other ranks have not written, they do
        not gather, and the message about the wait has to name the cause.
        """
        if written and not self._changed:
            names = ", ".join(written[:2])
            self._purpose = f"{self.title}, whose main parameters this rank has written ({names})"
        self._changed = True
        self._invalidate()

    def written_through(self, everything: bool) -> None:
        """A step has written main weights, and (`everything`) these weights in the same pass."""
        self._written_through = everything and (self._written_through or not self._changed)

    def start(self) -> None:
        """Begin making the whole weights ready; collective, and harmless when they are."""
        if self.state is not WeightsState.RELEASED:
            return
        with Serving(self._purpose or self.title):
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


class Writes:
    """What was written to the parameters of one group.

    `mains` are what the optimizer updates, `computes` what modules compute with (the same objects
    where main weights are not apart). If every rank holds the `whole` of both, values are compared.
    """

    def __init__(
        self, mains: Sequence[torch.Tensor], computes: Sequence[torch.Tensor], whole: bool
    ) -> None:
        self._mains, self._computes, self.whole = mains, computes, whole
        self._known = [*map(_VERSION, mains)]
        self._in_use: list[int] = []  # versions when modules began to hold compute parameters
        self._news: set[int] = set()
        self.uncompared: dict[tuple[int, bool], int] = {}
        """Which parameters this rank has written since ranks compared that, and how often: their
        indices, and whether it was the compute parameter, which each rank has whole, or the main
        one."""

    @property
    def count(self) -> int:
        """How often main parameters were written, as far as their version counters tell."""
        return sum(map(_VERSION, self._mains))

    def look(self, *, told: bool, compared: bool = True) -> None:
        """Note what was written since the last look; if `compared`, ranks are to compare it.

        Unless whoever steps the main parameters says so (`told`, by `forget`), a step is a write
        too, which counts where values can be compared.
        """
        now = [*map(_VERSION, self._mains)]
        if now != self._known:
            self._news.update(index for index, new in enumerate(now) if new != self._known[index])
            if compared and (told or self.whole):
                self._note(now, self._known, main=True)
            self._known = now
        if self._in_use and (now := [*map(_VERSION, self._computes)]) != self._in_use:
            self._note(now, self._in_use, main=False)

    def news(self) -> list[int]:
        """Main parameters that a look has found written since this was asked last."""
        news, self._news = sorted(self._news), set()
        return news

    def forget(self) -> None:
        """What was written since the last look was a step, which all ranks install."""
        self._known, self._news = [*map(_VERSION, self._mains)], set()

    # -- modules hold compute parameters for a while ------------------------------------------

    @property
    def in_use(self) -> bool:
        """Whether modules hold the compute parameters, where these are others."""
        return bool(self._in_use)

    def begin_use(self) -> None:
        """Modules hold the compute parameters from now on."""
        self._in_use = [*map(_VERSION, self._computes)]

    def end_use(self) -> bool:
        """They do no more: whether modules have written to them meanwhile."""
        now, before = [*map(_VERSION, self._computes)], self._in_use
        self._in_use = []
        if now != before:
            self._note(now, before, main=False)
        return now != before

    def _note(self, now: list[int], before: list[int], *, main: bool) -> None:
        for index, (new, old) in enumerate(zip(now, before, strict=True)):
            if new != old:
                earlier = self.uncompared.get((index, False), 0) if main else 0
                self.uncompared[index, not main] = earlier + new - old
