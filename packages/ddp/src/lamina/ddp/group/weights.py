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
from lamina.collectives.engine import AllGather, purpose
from lamina.ddp.parameters.axes import DataParallelAxes
from lamina.ddp.parameters.parameters import ParameterRef, title_of

_VERSION = attrgetter("_version")
_ADDRESS = torch.Tensor.data_ptr


class WeightsState(Enum):
    """Where a group's whole weights are, and what its modules hold.

    Nobody else keeps this: units, prefetch and budgets ask the weights. The storage's refusals, the
    class of released parameters and what modules hold follow from it, and are set by whoever
    changes it.

    Note [When new weights are installed]
        An optimizer writes main weights. Nothing else happens then, except that whole weights are
        marked as old: RELEASED, or STALE where modules hold the compute parameters. The next gather
        installs what was written, so a step costs no copy of its own, and weights that are written
        twice are installed once. Modules hold main parameters whenever they do not compute, since
        whoever reads, writes or saves a model between steps means those.
    """

    RELEASED = auto()
    """Not there, or not what main weights say: views of them must not be read."""
    GATHERING = auto()
    """On their way into their storage."""
    READY = auto()
    """There, and as the optimizer last left them."""
    STALE = auto()
    """As RELEASED, while modules hold the compute parameters."""
    REFRESHING = auto()
    """As GATHERING, while modules hold the compute parameters."""
    IN_USE = auto()
    """As READY, while modules hold the compute parameters."""

    __hash__ = object.__hash__  # by identity: Enum's own is a Python call for each look-up


_RELEASED, _GATHERING, _READY, _STALE, _REFRESHING, _IN_USE = WeightsState
TRANSITIONS: dict[str, dict[WeightsState, WeightsState]] = {
    # Their gather begins.
    "start": {_RELEASED: _GATHERING, _STALE: _REFRESHING},
    # Somebody has waited for it.
    "wait": {_GATHERING: _READY, _REFRESHING: _IN_USE},
    # Modules hold the compute parameters from now on.
    "begin_use": {_READY: _IN_USE},
    # Modules hold the main parameters again.
    "end_use": {_STALE: _RELEASED, _REFRESHING: _GATHERING, _IN_USE: _READY},
    # Their storage is given back, or their content is old: main weights were written.
    "leave": {_READY: _RELEASED, _IN_USE: _STALE},
}
"""By what happens to them, the state after it for each state before. Others stay as they are."""
_START, _WAIT, _BEGIN_USE, _END_USE, _LEAVE = TRANSITIONS.values()
COMING = frozenset({_GATHERING, _REFRESHING})
"""The whole weights are on their way."""
LIVE = COMING | {_READY, _IN_USE}
"""They are there or on their way."""
IN_USE = frozenset({_STALE, _REFRESHING, _IN_USE})
"""Modules hold the compute parameters."""


class Weights(ABC):
    """Model weights of one group.

    At rest a rank keeps `local`: in the compute dtype, unless gathers cast it.
    """

    full: torch.Tensor
    """The flat tensor whose views are the parameters; its storage may be released."""
    are_given_back = False
    """Whether a release gives memory back, and a gather takes it again."""

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
        self._pending: Handle | None = None
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
        return self.state is _READY or self.state is _IN_USE

    @property
    def settled(self) -> bool:
        """Whether `local` is what main weights say, and nothing is writing to it."""
        is_main = self.main_slice is None and not any(self._spreads)
        return is_main or (not self._changed and self.state not in COMING)

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

    # -- what happens to them: the events of the table, in the order of a step ----------------

    def mark_changed(self, *, written: Sequence[str] = ()) -> None:
        """The optimizer (or a load) wrote main weights: the next `start` installs them.

        Nobody told of `written`, which this rank has seen. If other ranks have not written, they do
        not gather, and the message about the wait has to name the cause.
        """
        if written and not self._changed:
            names = ", ".join(written[:2])
            self._purpose = f"{self.title}, whose main parameters this rank has written ({names})"
        self._changed = True
        # Nothing is sent here: only some ranks may have come this far, and none may ever compute.
        self._invalidate()

    def keep_for_step(self, keep: bool) -> None:
        """Say whether they stay gathered from their first use in a step until its end."""
        self.kept_for_step = keep

    def written_through(self, everything: bool) -> None:
        """A step has written main weights, and (`everything`) these weights in the same pass."""
        self._written_through = everything and (self._written_through or not self._changed)

    def start(self) -> None:
        """Begin making the whole weights ready; collective, and harmless when they are."""
        after = _START.get(self.state)
        if after is None:
            return  # they are there, or on their way
        # What was written since the last gather goes into this rank's part first.
        before = purpose.set(self._purpose or self.title)
        try:
            if self._changed:
                self._install()
                self._changed = self._written_through = False
            self._pending = self._gather()
        finally:
            purpose.reset(before)
        self._purpose = ""  # who has written is told of once
        self.state = after

    def wait(self) -> None:
        """Wait for what `start` began (on a GPU: make the current stream wait)."""
        after = _WAIT.get(self.state)
        if after is None:
            return  # nobody has begun a gather that is not waited for yet
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        self.state = after

    def begin_use(self) -> None:
        """Modules hold the compute parameters from now on."""
        self.state = _BEGIN_USE.get(self.state, self.state)

    def end_use(self) -> None:
        """Modules hold the main parameters again."""
        self.state = _END_USE.get(self.state, self.state)

    def _leave(self) -> None:
        """They are given back, or are old: a gather that is under way has to end first."""
        if self.state in COMING:
            self.wait()
        self.state = _LEAVE.get(self.state, self.state)

    def _install(self) -> None:
        """Write main weights into this rank's copy and spread it along the outer axis."""
        if self._main is None:
            return
        # A kernel of the step may have written these weights with the main ones.
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
            self._leave()

    def _install(self) -> None:
        super()._install()
        _, self._spread_inner = self._spreads

    def _gather(self) -> Handle | None:
        if not self._spread_inner:
            return None
        # In place: each rank's piece lies where it belongs in the whole.
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
    `fixed` are lists of parameters that stay where they are.
    """

    def __init__(
        self,
        mains: Sequence[torch.Tensor],
        computes: Sequence[torch.Tensor],
        *,
        whole: bool,
        fixed: Sequence[Sequence[torch.Tensor]],
    ) -> None:
        self._mains, self._computes, self.whole = mains, computes, whole
        self._known = [*map(_VERSION, mains)]
        self.addresses = [(parameters, [*map(_ADDRESS, parameters)]) for parameters in fixed]
        """Whole parameters that stay where they are, and their addresses."""
        # Versions of compute parameters when modules began to hold them; empty while they do not.
        self._computed_with: list[int] = []
        self.news: set[int] = set()
        """Main parameters that were found written since `clear_news`."""
        self.uncompared: dict[tuple[int, bool], int] = {}
        """Which parameters this rank has written since ranks compared that, and how often: their
        indices, and whether it was the compute parameter, which each rank has whole, or the main
        one."""

    @property
    def count(self) -> int:
        """How often main parameters were written, as far as their version counters tell."""
        return sum(map(_VERSION, self._mains))

    def look(self, *, has_optimizer: bool, compared: bool = True) -> None:
        """Note what was written since the last look; if `compared`, ranks are to compare it.

        Unless an optimizer steps the main parameters that says so (by `forget`), a step is a write
        too, which counts where values can be compared.
        """
        now = [*map(_VERSION, self._mains)]
        if now != self._known:
            self.news.update(index for index, new in enumerate(now) if new != self._known[index])
            if compared and (has_optimizer or self.whole):
                self._note(now, self._known, main=True)
            self._known = now
        before = self._computed_with
        if before and (now := [*map(_VERSION, self._computes)]) != before:
            self._note(now, before, main=False)

    def clear_news(self) -> None:
        """What a look has found so far is known."""
        self.news = set()

    def take_uncompared(self) -> dict[tuple[int, bool], int]:
        """`uncompared`, which the ranks compare now."""
        taken, self.uncompared = self.uncompared, {}
        return taken

    def refuse_assigned(self, refs: Sequence[ParameterRef]) -> None:
        """Raise if a tensor was assigned to `.data` of a whole parameter, before memory is read.

        Note [Assigned data]: `p.data = x` takes a parameter out of its buffer. Modules and
        optimizers that hold `p` go on with `x`, as in plain PyTorch. A flat step, a gather, and
        whoever reads the buffer would not know of it, and no version counter tells. The address
        does. To copy `x` into the buffer would overwrite what `p.data` was before, which users keep
        to assign it again.
        """
        for parameters, addresses in self.addresses:
            now = [*map(_ADDRESS, parameters)]
            if now != addresses:
                pairs = zip(refs, now, addresses, strict=True)
                name = next(ref.name for ref, here, was in pairs if here != was)
                raise RuntimeError(
                    f"{name} was taken out of its buffer by assigning .data of the parameter: "
                    "write into it (`with torch.no_grad(): parameter.copy_(value)`), and keep "
                    "copies of values (parameter.detach().clone()) to bring them back"
                )

    def forget(self) -> None:
        """What was written since the last look was a step, which all ranks install."""
        self._known, self.news = [*map(_VERSION, self._mains)], set()

    # -- modules hold compute parameters for a while ------------------------------------------

    def begin_use(self) -> None:
        """Modules hold the compute parameters from now on."""
        self._computed_with = [*map(_VERSION, self._computes)]

    def end_use(self) -> bool:
        """They do no more: whether modules have written to them meanwhile."""
        now, before = [*map(_VERSION, self._computes)], self._computed_with
        self._computed_with = []
        written = bool(before) and now != before
        if written:
            self._note(now, before, main=False)
        return written

    def _note(self, now: list[int], before: list[int], *, main: bool) -> None:
        for index, (new, old) in enumerate(zip(now, before, strict=True)):
            if new != old:
                earlier = self.uncompared.get((index, False), 0) if main else 0
                self.uncompared[index, not main] = earlier + new - old
