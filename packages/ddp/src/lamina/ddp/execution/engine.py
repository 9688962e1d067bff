"""The engine of one model: when units are gathered, given back and reduced.

A forward walks units in some order; the engine gathers the next unit while one computes. A backward
walks it the other way. What starts a backward is the first gradient that reaches any unit's output,
what ends it is autograd's own callback (`GradientReducer.begin_backward` and the story below it),
and both are told apart from recomputation, which runs forwards inside a backward.

There are two plans. `fully_shard` and `shard_module` plan units of modules, whose weights are given
back after use. `DistributedDataParallel` plans buckets over whole weights: its only unit is the
root, which has no weights of its own, and `Prefetcher` brings those of buckets back in one order.

Note [Two orders of gathers]
    Modules that are gathered themselves (`fully_shard`) force one order on all ranks: whoever runs
    a unit gathers it. So the order of the last forward is what comes next, and a unit that is
    gathered ahead and not called costs a gather and nothing else. Weights that stay whole force no
    order: ranks may run different modules, as with layers that are dropped at random. So all of
    them begin the gathers in one fixed order: a bucket of `DistributedDataParallel`, or a unit of
    `fully_shard`, that is waited for begins those before it too, and the end of the forward begins
    the rest.

Note [The last call is kept]
    A forward gathers units as their calls begin. Its backward comes to them as their calls have
    ended, the other way round. The two orders differ where a unit is called inside another one:
    that around it begins first and ends last, so its backward comes first. And a unit that is
    called several times has a place for each call. The unit whose call ends last of all is kept,
    since its backward begins at once, and would gather what was just given back.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from lamina.buffers import StaleStorageError
from lamina.collectives.engine import current_stream, profiling
from lamina.ddp.backward.agreement import GatherLog
from lamina.ddp.backward.reducer import BACKWARD, GradientReducer
from lamina.ddp.compat import current_graph_task_id
from lamina.ddp.execution.module_buffers import ModuleBuffers
from lamina.ddp.execution.unit import PendingBackward, UnavailableError, Unit, WaitingGraphs
from lamina.ddp.group.group import ParameterGroup


class UnitOrder(Protocol):
    """Compares over ranks which units run."""

    def gather(self, unit: Unit, ran: Sequence[Unit], *, backward: bool) -> None:
        """A unit is about to be gathered, after these have begun to run."""

    def end(self, ran: Sequence[Unit], *, backward: bool) -> None:
        """A forward or backward of these units has ended."""


class SharedSlots(Protocol):
    """Storage that units share by a plan, and that may move a unit from one step to the next.

    An epoch is a time in which a unit's weights do not move. Views that autograd has saved are of
    one epoch, and the unit has to come back there for their backward.
    """

    def start(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Begin a unit's gathers; whoever of `units` sits in its place without need makes room."""

    def save_epochs(self, unit: Unit) -> None:
        """Autograd saves views of a unit's weights from now on."""

    def epochs(self, unit: Unit) -> tuple[int, ...]:
        """The epochs of a unit's weights."""

    def return_to(self, unit: Unit, epochs: tuple[int, ...]) -> None:
        """A backward comes to views of these epochs; StaleStorageError: they are over."""

    def forget_epochs(self, unit: Unit) -> None:
        """No graph holds views of a unit's weights any more."""

    def settle(self, units: Sequence[Unit]) -> None:
        """A whole step was observed, and no graph waits."""

    def apart(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """All units are whole inside, as in no step."""

    def close(self) -> None:
        """Let go of registered memory."""


class GatherBudget:
    """A limit on the bytes of whole weights that are there, or on their way.

    A unit is gathered ahead only where it fits. One that is about to compute is always gathered:
    units that are not computing (gathered ahead, or kept since their forward) go first. Units that
    stay whole for a step because somebody asked for it are not counted.
    """

    def __init__(self, units: Iterable[Unit], limit: int) -> None:
        self.limit = limit
        self._units = tuple(units)

    def fits(self, unit: Unit) -> bool:
        """Whether a unit can be gathered beside what is there or on its way."""
        # Units that stay whole for a step cannot be given back, so the limit is not about them.
        live = sum(other.live_bytes for other in self._units if not other.stays_whole)
        return live + unit.gathered_bytes - unit.live_bytes <= self.limit

    def make_room(self, unit: Unit, order: Sequence[Unit], computing: Sequence[Unit]) -> None:
        """Give back what need not be there for a unit that is about to compute.

        Units run in this order: those whose turn is farthest off go first, and none in whose
        forward we are (`computing`).
        """
        if self.fits(unit):
            return
        turn = {id(other): index for index, other in enumerate(order)}
        here = turn.get(id(unit), 0)
        idle = [
            other
            for other in self._units
            if other.live_bytes
            and other is not unit
            and not other.in_backward
            and not any(other is busy for busy in computing)
        ]
        idle.sort(key=lambda other: abs(turn.get(id(other), len(order)) - here), reverse=True)
        for other in idle:
            if self.fits(unit):
                return
            other.reshard()


class Prefetcher:
    """Begins the gathers of one model's units, see Note [Two orders of gathers].

    Args:
        units: all of them; in order of first use, which is kept to, if the order is `fixed`.
        fixed: whether all ranks begin gathers in this one order, whatever modules they run.
        ahead: how many units are on their way beside the one that is needed.
        budget: bytes of whole weights instead of a number of units; None counts units.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        fixed: bool = False,
        ahead: int = 1,
        budget: int | None = None,
    ) -> None:
        self.order: list[Unit] = list(units) if fixed else []
        """The units that the last forward has called, call by call, or as they always run."""
        self.returns: list[Unit] = []
        """The same calls but the root's, as the backward of that forward comes to them."""
        self.ran: list[Unit] = []
        """The units that the forward at hand has called."""
        self.log = GatherLog([unit.title for unit in units])
        """The gathers that were begun since ranks have compared them last."""
        self._ended: list[Unit] = []  # those of these calls that are over, but the root's
        self._returned = 0  # how many of `returns` the backward at hand has come to
        self.budget = None if budget is None else GatherBudget(units, budget)
        self.fixed = fixed
        self.ahead = ahead
        self._begun = len(self.order)  # of a fixed order: units before this place have been begun

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        self.ran, self._ended = [], []

    def begin_call(self, unit: Unit, start: Callable[[Unit], None]) -> None:
        """A unit is about to compute: `start` its gather, and those beside it."""
        # Its own gather goes first on the wire. The next unit's follows before anybody waits, so
        # that it is under way while this one computes.
        start(unit)
        self.begin_beside(unit, 1)

    def end_call(self, unit: Unit) -> bool:
        """A call of a unit has ended: whether it is the last of a forward like the one before."""
        self._ended.append(unit)
        return len(self._ended) == len(self.returns) and unit is self.returns[0]

    def end_forward(self) -> None:
        """A forward has ended: its order is what comes next."""
        if self.fixed:
            self.begin_up_to(len(self.order))  # those of modules that ran on other ranks only
        else:
            self.order, self.returns, self._returned = self.ran, self._ended[::-1], 0

    def begin_beside(self, unit: Unit, step: int) -> None:
        """Begin the gathers of units that came after (1) or before (-1) a unit last time."""
        ahead: Sequence[Unit] = ()
        if step in unit.prefetch:  # somebody has said which
            ahead = unit.prefetch[step]
        elif self.ahead and not self.fixed:
            # A unit may be called several times, so its place is that of this call of it.
            forward = step > 0
            order, place = (
                (self.order, len(self.ran) - 1) if forward else (self.returns, self._returned)
            )
            if place >= len(order) or order[place] is not unit:  # it runs otherwise than last time
                place = order.index(unit) if unit in order else len(order)
            self._returned = self._returned if forward else place + 1
            ahead = order[place + 1 :]
            ahead = ahead[: self.ahead] if self.budget is None else ahead
        for other in ahead:
            if step < 0 and not other.unshard_in_backward:
                continue
            if self.budget is not None and not self.budget.fits(other):
                return
            # Its slot may be taken for now: it is gathered when its turn comes.
            with suppress(StaleStorageError):
                other.start_unshard()

    # -- a fixed order ------------------------------------------------------------------------

    def begin_up_to(self, stop: int) -> None:
        """Begin the gathers of all units before a place."""
        while self._begun < min(stop, len(self.order)):
            self.order[self._begun].start_unshard()
            self._begun += 1

    def wait_for(self, place: int) -> None:
        """The unit at a place is read now."""
        unit = self.order[place]
        if not all(group.weights.ready for group in unit.groups):
            self.begin_up_to(place + self.ahead)
            unit.wait()

    def finish(self) -> None:
        """Wait until all units are there (collective, if they are not)."""
        self.begin_up_to(len(self.order))
        for unit in self.order:
            unit.wait()

    def start_again(self) -> None:
        """Main weights were written: all units have to come back (on all ranks)."""
        if 0 < self._begun < len(self.order):
            self.begin_up_to(len(self.order))  # peers may have begun all of the last ones
        for unit in self.order:
            for group in unit.groups:
                group.weights.mark_changed()
        self._begun = 0


class RegistrationOrder(Prefetcher):
    """Begins the gathers of units that keep whole weights, see Note [Two orders of gathers].

    `units` are in order of registration. So many of them are on their way `ahead` of the one that
    computes.
    """

    def __init__(self, units: Sequence[Unit], *, ahead: int = 1) -> None:
        super().__init__(units, ahead=ahead)
        self._registered = tuple(units)
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._next = 0  # of the unit whose gather is begun next in the forward at hand

    def begin_forward(self) -> None:
        """A forward of the model begins."""
        super().begin_forward()
        self._next = 0

    def begin_call(self, unit: Unit, start: Callable[[Unit], None]) -> None:
        """A unit is about to compute: begin the gathers up to its own, and those of units ahead."""
        last = own = self._numbers[unit]
        if 1 not in unit.prefetch:
            last += self.ahead
        elif chosen := unit.prefetch[1]:  # somebody has said which
            last = max(own, *map(self._numbers.__getitem__, chosen))
        self._begin_to(last + 1)
        start(unit)  # a module around it may have written to its parameters since they were begun

    def begin_beside(self, unit: Unit, step: int) -> None:
        """In a backward nothing is to be gathered: the forward has begun all."""

    def end_forward(self) -> None:
        """A forward has ended: other ranks may have run what this one has not."""
        super().end_forward()
        self._begin_to(len(self._registered))

    def _begin_to(self, stop: int) -> None:
        """Begin the gathers of the units before a number; what is there by now costs nothing."""
        for unit in self._registered[self._next : stop]:
            unit.start_unshard()
        self._next = max(self._next, stop)


@dataclass(frozen=True)
class Guards:
    """What looks after a model beside its computing.

    Attributes:
        look: looks at the outermost module before each forward of training (`ModuleWatch`).
        module_buffers: brings buffers together before forwards.
        order: compares over ranks which units run.
        reads: makes what is entered around a forward: it watches over reads of released weights.
    """

    look: Callable[[nn.Module], None] | None = None
    module_buffers: ModuleBuffers | None = None
    order: UnitOrder | None = None
    reads: Callable[[], AbstractContextManager[None]] = nullcontext


class Engine:
    """Gathers, gives back and reduces the units of one model.

    Args:
        units: the root first, then in order of registration.
        reducer: sums gradients over ranks.
        prefetcher: which units are gathered ahead.
        slots: places that units share, if they do; see Note [Slots] in `lamina.buffers.pool.slots`.
        guards: what else looks after the model.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reducer: GradientReducer,
        prefetcher: Prefetcher,
        *,
        slots: SharedSlots | None = None,
        guards: Guards | None = None,
    ) -> None:
        self.units = tuple(units)
        self.root = self.units[0]
        self.groups = tuple(group for unit in self.units for group in unit.groups)
        """All groups of all units, frozen ones included."""
        self.reducer = reducer
        self.prefetcher = prefetcher
        self.slots = slots
        self.guards = guards or Guards()
        reducer.tell(self)
        if any(unit.gathered for unit in self.units):
            engine = weakref.ref(self)  # the engine holds its units, and not the other way round
            for number, unit in enumerate(self.units):
                tell = functools.partial(prefetcher.log.note, number)
                if self.guards.order is not None:
                    tell = functools.partial(_before_gather, engine, tell)
                unit.tell_before_gathers(tell)
        self._graphs = WaitingGraphs(group for group in self.groups if group.requires_grad)
        self._swapped = [g for g in self.groups if g.mains_are_separate and g.writes.addresses]
        self._device = next((g.device for g in self.groups), torch.device("cpu"))
        self._computing: list[Unit] = []
        self._stream: torch.cuda.Stream | None = None  # of the root's forward
        self._ran_backward: list[Unit] = []
        self._recomputed: Unit | None = None
        self._all_whole = False

    @property
    def gathers(self) -> GatherLog:
        """The gathers of units whose weights come and go, which all ranks begin in one order."""
        return self.prefetcher.log

    def gathered_again(self) -> list[ParameterGroup]:
        """Groups that are released after their forward, so that a backward gathers them again."""
        last = next(iter(self.prefetcher.returns), self.units[-1])
        kept = {self.root: self.root.reshard_after_forward is not True, last: True}
        again = (
            unit
            for unit in self.units
            if unit.unshard_in_backward
            and not unit.stays_whole
            and not kept.get(unit, unit.reshard_after_forward is False)
        )
        return [group for unit in again for group in unit.groups]

    def look(self, root: nn.Module) -> None:
        """Before a forward of the outermost module: its buffers, and parameters new since.

        RuntimeError: it holds parameters that it did not hold when it was wrapped.
        """
        guards = self.guards
        if self.reducer.phase is BACKWARD:
            return
        if guards.look is not None and torch.is_grad_enabled():
            guards.look(root)
        if guards.module_buffers is not None:
            guards.module_buffers.before_forward(root)

    @property
    def computes(self) -> bool:
        """Whether a forward of the root, or a backward, is going on: units are called by it."""
        return self.reducer.phase is BACKWARD or self.root in self._computing

    # -- forward ------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """A unit's module is about to run."""
        reducer, prefetcher = self.reducer, self.prefetcher
        reducer.abandon_if_raised()
        self._computing.append(unit)
        if reducer.phase is BACKWARD:
            # Recomputation: the backward that runs has gathered what it needs ahead of this.
            self._start(unit)
            unit.finish_unshard()
            if profiling():
                unit.forward.begin("forward again of", unit.name)
            return
        if unit is self.root:
            self._begin_forward()
        elif self._stream is not None and self.root in self._computing:
            self._refuse_other_stream(unit)
        training = torch.is_grad_enabled()
        if not training:
            unit.calls.run_without_grad()
        prefetcher.ran.append(unit)
        # A module around it may have written to its parameters since the forward began.
        if unit is not self.root:
            unit.follow_main_weights()
        prefetcher.begin_call(unit, self._start)
        unit.finish_unshard()
        # From here on autograd saves views of the weights, which backward has to find again.
        if training and self.slots is not None:
            self.slots.save_epochs(unit)
        if profiling():
            unit.forward.begin("forward of", unit.name)

    def _refuse_other_stream(self, unit: Unit) -> None:
        if current_stream(self._device) != self._stream:
            raise RuntimeError(
                f"unit {unit.name} runs on another CUDA stream than the forward it is part of, and "
                "its weights are gathered and released for that one alone: run all units on one "
                "stream, or leave this module out of fsdp_unit_modules"
            )

    def _begin_forward(self) -> None:
        """The root is about to run: follow what the user has done since the last forward."""
        self.prefetcher.begin_forward()
        self._computing = [self.root]
        self._graphs.begin()
        self._stream = current_stream(self._device)
        # Written weights come back when their unit is gathered; in a fixed order all units do.
        if self._follow_users() and self.prefetcher.fixed:
            self.prefetcher.start_again()
        for unit in self.units:
            unit.calls.new_forward()

    def _follow_users(self) -> bool:
        """Follow what users have done to parameters: whether they have written to any."""
        # Where modules hold main parameters between forwards, what is assigned to one is not what
        # they will compute with.
        for group in self._swapped:
            group.writes.refuse_assigned(group.refs)
        written = [group.begin_forward() for group in self.reducer.groups]  # all of them look
        return any(written)

    def after_forward(self, unit: Unit, member: int = 0, *, marked: bool = True) -> None:
        """A unit's module has run: release it, unless backward or others of its own need it.

        `marked`: gradients can come back through what it returned.
        """
        if unit.forward.open is not None:
            unit.forward.end()
        if unit in self._computing:
            self._computing.remove(unit)
        if self.reducer.phase is BACKWARD:
            self._after_recomputation(unit)
            return
        training = torch.is_grad_enabled()
        complete = unit.calls.members == 1 or unit.calls.member_ran(member)
        if unit is self.root:
            training = training and (marked or self._comes_back_unmarked())
            self._end_forward(training)
            # Its backward is the last one. But modules between units may read its weights first.
            if unit.reshard_after_forward and (training or not self._all_whole):
                unit.reshard()
            return
        last = self.prefetcher.end_call(unit)
        keep = training and (last or unit.reshard_after_forward is False)
        keep = keep or (self._all_whole and not training)
        if complete and not keep:
            unit.reshard()

    def _comes_back_unmarked(self) -> bool:
        """Whether a backward may come to a forward that returned no graph.

        Of a teacher, whose parameters are all frozen, none will. But a hook may have kept features
        through which gradients of its inputs come.
        """
        calls = [unit.calls for unit in self.units]
        unseen = any(each.hands_gradients_on or each.come_back_unannounced for each in calls)
        return unseen or any(group.wants_gradients for group in self.groups)

    def _end_forward(self, training: bool) -> None:
        self.prefetcher.end_forward()
        ran = self.prefetcher.ran
        if self.guards.order is not None:
            self.guards.order.end(ran, backward=False)
        called = set(ran)
        for unit in self.units:
            if not training:
                unit.calls.end_evaluation()
            # Some are gathered ahead and then not called.
            if unit not in called if training else not self._all_whole:
                unit.reshard()
        if training:
            self._graphs.wait()

    def _after_recomputation(self, unit: Unit) -> None:
        if unit.in_backward:
            return
        # Keep only the newest: with reentrant checkpointing its backward comes next; when a
        # segment of several units is recomputed, the others are gathered again in their turn.
        before, self._recomputed = self._recomputed, unit
        if before is None or before is unit or before.in_backward:
            return
        before.reshard()

    def _start(self, unit: Unit) -> None:
        """Begin a unit's gathers; whoever takes its room without need makes place."""
        budget = self.prefetcher.budget
        if budget is not None:
            budget.make_room(unit, self.prefetcher.order, self._computing)
        if self.slots is None:
            unit.start_unshard()
        else:
            self.slots.start(unit, self.units)

    # -- backward -----------------------------------------------------------------------------

    def before_backward(self, unit: Unit, epochs: tuple[int, ...] = (), member: int = 0) -> None:
        """The first gradient has reached one of the outputs of a unit's module.

        StaleStorageError: slots have moved the unit since that forward, whose `epochs` are those of
        its weights' storage.
        """
        # The first unit whose backward begins, begins that of the model.
        self.reducer.begin_backward()
        if self.slots is not None:
            self.slots.return_to(unit, epochs)
        if unit.calls.members > 1:
            unit.calls.member_came_back(member)
        begins = unit.enter_backward()
        # As in forward: its own gather, the next one's, and then the wait.
        if unit.unshard_in_backward:
            self._start(unit)
        # Another output or call of it may come later, with the next unit under way or over.
        if begins:
            self._ran_backward.append(unit)
            self.prefetcher.begin_beside(unit, -1)
        if unit.unshard_in_backward:
            unit.finish_unshard()

    def after_backward(self, unit: Unit, pending: PendingBackward) -> None:
        """Gradients of the unit's inputs are there, so those of its parameters are complete."""
        pending.came_back()
        self._graphs.came_back(pending)
        if self.reducer.phase is not BACKWARD or unit.calls.expects_more:
            return  # another forward of this unit is still to come back; or the end closes it
        # Weights go before the reduction takes memory. The root's stay: whatever is left of the
        # graph may read them.
        if unit is not self.root:
            unit.leave_backward()
        self._close(unit)

    def _close(self, unit: Unit) -> None:
        for group in unit.groups:
            if group.gradients is not None:
                self.reducer.close(group)

    def backward_begins(self) -> None:
        """The first gradient has arrived (called by the reducer).

        Raises:
            UnavailableError: for `create_graph=True` where units are gathered.
        """
        if torch.is_grad_enabled() and any(unit.gathered for unit in self.units):
            raise UnavailableError(
                "a backward with create_graph=True: its graph would read weights that are given "
                "back before a second backward comes to them. Use zero_dp_strategy=2 (or less), "
                "which keeps weights whole"
            )
        self._graphs.begin_backward()
        self._ran_backward = []
        self._recomputed = None

    def backward_ends(self) -> None:
        """Autograd is done (called by the reducer): groups that no unit closed are complete."""
        if self.guards.order is not None:
            self.guards.order.end(self._ran_backward, backward=True)
        for unit in self._ran_backward:
            self._close(unit)

    def backward_is_over(self, *, raised: bool) -> None:
        """Gradients are reduced, or the backward has raised (called by the reducer)."""
        # One that raised is often noticed by the next, whose graph may read what is still whole.
        release = current_graph_task_id() == -1 or not raised
        self._ran_backward = []
        self._recomputed = None
        self._graphs.expect_no_more()
        waits = []
        for unit in self.units:
            unit.calls.end_backward()
            unit.leave_backward(release=release)
            if unit.calls.expects_more:
                waits.append(unit)
            elif self.slots is not None and not self._graphs.kept:
                self.slots.forget_epochs(unit)
        self._graphs.end_backward(waits=bool(waits) or self._graphs.kept)
        if raised:
            return
        if self.slots is not None and self.prefetcher.order and not (waits or self._graphs.kept):
            self.slots.settle(self.units)
        if self.reducer.is_final:
            self.expect_step()

    # -- between steps ------------------------------------------------------------------------

    def expect_step(self) -> None:
        """Gradients are final: an optimizer that nobody was told of may write main weights."""
        for group in self.groups:
            if group.shown.untold:
                group.weights.mark_changed()

    def mark_weights_changed(self) -> None:
        """Main weights were written: every unit installs them before it computes again."""
        for group in self.groups:
            group.weights.mark_changed()

    def put_at_rest(self, units: Iterable[Unit], *, loading: bool = False) -> None:
        """Let the module of `units` hold what the optimizer updates, wherever a step has stopped.

        A backward that is still to come gathers what it needs again. Inside `unsharded` whole
        weights were asked for, and stay. RuntimeError: while a backward runs, or where what the
        module holds is about to be written (`loading`) inside `unsharded`.
        """
        if self._all_whole:
            if loading:
                raise RuntimeError(
                    "load_state_dict() inside unsharded() would write to copies that are given "
                    "back at its end: load before or after it"
                )
            return
        # A backward that raised is no backward that runs: a state may be saved after the exception.
        self.reducer.abandon_if_raised()
        if self.reducer.phase is BACKWARD:
            raise RuntimeError(
                "state_dict() or load_state_dict() while a backward runs (in this or another "
                "thread), which computes with the whole weights: call it between two steps"
            )
        for unit in units:
            unit.reshard(even_if_kept=True)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """All units whole for the time being (collective), evaluations inside included."""
        before, self._all_whole = self._all_whole, True
        try:
            with ExitStack() as stack:
                # Slots hold a few units at a time, and here all are whole at once.
                if self.slots is not None:
                    stack.enter_context(self.slots.apart(self.units))
                self._follow_users()
                for unit in self.units:
                    # The way back is noted before the gather: a gather that raises leaves no unit
                    # whole.
                    stack.callback(unit.reshard)
                    unit.unshard()
                yield
        finally:
            self._all_whole = before


def _before_gather(
    reference: weakref.ref[Engine], note: Callable[[Unit], None], unit: Unit
) -> None:
    """With `check_order`: whether all ranks gather this unit now."""
    note(unit)
    engine = reference()
    if engine is not None and engine.guards.order and unit.live_bytes < unit.gathered_bytes:
        backward = engine.reducer.phase is BACKWARD
        ran = engine._ran_backward if backward else engine.prefetcher.ran
        engine.guards.order.gather(unit, ran, backward=backward)
