"""The order in which gradients are summed over ranks, and the two ends of a backward.

Every rank issues the same collectives in the same order, whatever its autograd graph did. With
`Order.STATIC` a group that is ready waits for those before it in one fixed list, so that ranks
whose unused parameters differ stay in step. With `Order.AS_CLOSED` groups go in the order in
which they close: right where the weights' own gathers already force one order on all ranks.
"""

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import NamedTuple, Protocol

import torch

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import ScratchBuffers
from lamina.collectives import Handle
from lamina.collectives.engine import current_stream, purpose
from lamina.ddp.backward.agreement import GatherLog, GradientChecks, Settlement
from lamina.ddp.backward.gradient_hooks import (
    NO_STREAM,
    BackwardStream,
    LeafHook,
    hook_leaves,
)
from lamina.ddp.compat import current_graph_task_id, queue_callback, will_execute
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.strategy import Cadence

_DROPPED_WITHIN = 1.0  # s, for autograd's thread: see Note [Who ends a backward]


class Order(Enum):
    """Which order of reductions all ranks follow."""

    STATIC = "static"
    AS_CLOSED = "as_closed"


class ReducerPhase(Enum):
    """What a reducer is doing."""

    IDLE = auto()
    """Nothing: no backward runs."""
    BACKWARD = auto()
    """A backward runs, or has raised and nobody has noticed yet."""
    LATE = auto()
    """Gradients arrive that belong to backwards that are over (`late_gradients`)."""
    SYNCING = auto()
    """Between `start` and `finish`: buffers are on their way, and nothing may write to them."""


BACKWARD = ReducerPhase.BACKWARD


class BackwardListener(Protocol):
    """What a wrapper does at the two ends of a backward, beside the reductions."""

    @property
    def gathers(self) -> GatherLog:
        """The gathers that this rank has begun in the step, to be compared at its end."""
        ...

    def backward_begins(self) -> None:
        """The first gradient has arrived. May raise to refuse the backward."""
        ...

    def backward_ends(self) -> None:
        """Autograd is done; what is left will be reduced next. May `close` groups."""
        ...

    def backward_is_over(self, *, raised: bool) -> None:
        """All gradients are reduced and shown; or (`raised`) the backward was abandoned."""
        ...


class _Flight(NamedTuple):
    """A reduction under way: what it waits for now, and the steps after that."""

    number: int
    nbytes: int
    handle: Handle
    steps: Iterator[Handle]


class ReductionQueue:
    """Reductions in one order on all ranks, and those of them that are under way.

    The arguments are those of `GradientReducer`. Reductions are a part of backwards that run on
    `stream`, which is None on a device without streams. `started` is called with a group before its
    reduction begins, and `done` when users' hooks are to see its final gradients.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        order: Order,
        overlap: bool,
        max_in_flight: int,
        max_bytes_in_flight: int | None,
        max_bytes_held: int | None,
        stream: BackwardStream | None,
        started: Callable[[ParameterGroup], None] | None,
        done: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._gradients = [group.trained for group in groups]
        self.order = order
        self.is_final = True
        """Whether the current microbatch is the step's last."""
        self.max_bytes_in_flight = max_bytes_in_flight
        self._max_bytes_held = max_bytes_held
        for gradients in () if max_bytes_held is None else self._gradients:
            gradients.local.tell_before_buffers(self._make_room)
        self._overlap = overlap
        self._max_in_flight = max(1, max_in_flight)
        self._started, self._done = started, done
        self.closed: set[int] = set()
        """Numbers of groups whose gradients are complete."""
        self.issued: list[int] = []
        """Numbers of groups in the order in which their reductions began in this backward."""
        self._turns: deque[int] = deque()  # what `Order.STATIC` has still to issue, in its order
        self._in_flight: deque[_Flight] = deque()
        self._stream = stream

    def expect_final(self, final: bool) -> None:
        """Say whether the current microbatch is the step's last."""
        self.is_final = final

    def reduces(self, number: int) -> bool:
        """Whether a group's gradients of the current microbatch go over the wire."""
        return self.is_final or self._gradients[number].cadence is Cadence.EVERY_MICROBATCH

    def open(self) -> None:
        """No group is complete yet, and nothing is under way."""
        self._in_flight.clear()
        self.closed.clear()
        self.issued.clear()
        if self.order is Order.STATIC:
            self._turns = deque(filter(self.reduces, range(len(self._groups))))

    def close(self, number: int) -> None:
        """A group is complete: reduce it when its turn comes."""
        if number in self.closed or not self.reduces(number):
            return
        self.closed.add(number)
        if self.order is Order.AS_CLOSED:
            self.issue(number)
            return
        while self._turns and self._turns[0] in self.closed:
            self.issue(self._turns.popleft())

    def issue(self, number: int) -> None:
        """Begin a group's reduction, once there is room for it on the wire."""
        group, gradients = self._groups[number], self._gradients[number]
        self.issued.append(number)
        if self._started is not None:
            self._started(group)
        # Older ones are waited for first: each holds a gradient buffer until it has ended.
        leave = self._max_in_flight - 1
        if self.max_bytes_in_flight is not None:
            leave = self._room_for(gradients.wire_bytes, self.max_bytes_in_flight)
        if len(self._in_flight) > leave:
            self.drain(leave)
        # See Note [Reductions are generators]: this runs up to the first collective.
        steps = gradients.reduce(self.is_final)
        before = purpose.set(group.weights.title)
        try:
            handle = next(steps, None)
        finally:
            purpose.reset(before)
        if handle is not None:
            self._in_flight.append(_Flight(number, gradients.wire_bytes, handle, steps))
        elif self.is_final and group.shown.hooks.exist:  # one rank alone waits for nothing
            self._done(number)
        if not self._overlap:
            self.drain(0)

    def _room_for(self, nbytes: int, limit: int) -> int:
        """How many of the newest reductions may go on beside another one, within `limit` bytes."""
        left, count = limit - nbytes, 0
        for flight in reversed(self._in_flight):
            left -= flight.nbytes
            if left < 0:
                break
            count += 1
        return count

    def _make_room(self, nbytes: int) -> None:
        """Wait for the oldest reductions, so that a buffer can be filled beside the others.

        Note [Two units' gradients]
            A unit's reduction has the whole backward of the next unit to hide under. When the unit
            after that one brings its first gradient, the reduction is waited for and its buffer is
            filled again. So two units' gradients are held at once, and not a third one's. Ranks
            whose unused parameters differ come to a first gradient at different points of their
            backwards. So only reductions whose end begins no further collective are ended here. A
            sum over two axes does, and so may the hook of `set_all_reduce_hook`. See
            docs/decisions/0428.
        """
        if not self._in_flight:
            return
        leave = self._room_for(nbytes, self._max_bytes_held or 0)
        while len(self._in_flight) > leave:
            # On another stream than the backward's a wait would not order what the buffer is for.
            oldest = self._in_flight[0].number
            elsewhere = self._stream is not None and self._stream.elsewhere is not None
            if elsewhere or not self._gradients[oldest].ends_alone:
                return
            self.drain(len(self._in_flight) - 1)

    def drain(self, leave: int) -> None:
        """Wait for the oldest reductions, until so many are left under way."""
        while len(self._in_flight) > leave:
            flight = self._in_flight.popleft()
            group = self._groups[flight.number]
            flight.handle.wait()
            # Further collectives of a sum over two axes, and what comes after the last one.
            before = purpose.set(group.weights.title)
            try:
                for further in flight.steps:
                    further.wait()
            finally:
                purpose.reset(before)
            if self.is_final and group.shown.hooks.exist:
                self._done(flight.number)

    def abandon(self) -> None:
        """The backward has raised: what is under way ends, and nobody reads it."""
        for flight in self._in_flight:
            flight.handle.wait()
        self._in_flight.clear()


class _HookCalls:
    """Users' hooks on parameters: which have been called in the backward at hand."""

    def __init__(self, groups: Sequence[ParameterGroup]) -> None:
        self._groups = groups
        self._called: dict[int, set[int]] = {}  # by number of the group

    def begin(self) -> None:
        """A backward begins."""
        self._called.clear()

    def call(self, number: int) -> None:
        """A group's gradients are final: call users' hooks, and free what these have dropped.

        A parameter without a gradient on this rank may have one on another. Nobody knows before the
        end of the backward, so its hooks are called there.
        """
        group = self._groups[number]
        called = self._called.setdefault(number, set())
        if called:
            raise RuntimeError(
                f"a gradient came to {group.refs[min(called)].name} or its neighbours after their "
                "hooks were called with the final one: use torch.utils.checkpoint with "
                "use_reentrant=False, or let an optimizer step after the backward"
            )
        group.shown.show()
        group.call_user_hooks(called)
        group.trained.forget_squares()
        if len(called) == len(group.refs):
            group.release_zeroed_gradients()

    def note_produced(self) -> None:
        """A parameter whose hooks were called got a gradient, whatever they have dropped."""
        for number, called in self._called.items():
            gradients = self._groups[number].trained
            produced = gradients.produced_gradient
            gradients.mark_produced([flag or i in called for i, flag in enumerate(produced)])

    def call_late(self) -> None:
        """All ranks know by now which parameters have a gradient, from this rank or from others."""
        for number, called in self._called.items():
            group, gradients = self._groups[number], self._groups[number].trained
            for index, produced in enumerate(gradients.produced_gradient):
                if produced and index not in called:
                    group.shown.show_one(index)
            group.call_user_hooks(called)
            gradients.forget_squares()
            gradients.mark_produced([main.grad is not None for main in group.main_parameters])
            group.release_zeroed_gradients()


class GradientReducer:
    """Sums the gradients of groups over ranks while backward goes on.

    Args:
        groups: groups with requires_grad, in the order of `Order.STATIC`.
        scratch: the pool that the groups' short-lived buffers come from.
        order: see `Order`.
        overlap: reduce while backward goes on; otherwise each reduction is waited for at once.
        max_in_flight: reductions not yet waited for; each holds one gradient buffer.
        max_bytes_in_flight: bytes of those buffers instead; None counts reductions. One is always
            let go.
        max_bytes_held: bytes of the buffers in flight and one that is about to be filled. See Note
            [Two units' gradients].
        close_when_complete: close a group as soon as each of its parameters got a gradient in this
            backward, for wrappers without units. A gradient that comes later still (a module that
            reentrant recomputation runs twice) is summed at the end of the backward.
        check_finite: look for NaN and infinity in each gradient of this rank (`GradientChecks`).
        largest: refuse gradients of a larger magnitude; None does not look.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        scratch: ScratchBuffers,
        *,
        order: Order = Order.STATIC,
        overlap: bool = True,
        max_in_flight: int = 2,
        max_bytes_in_flight: int | None = None,
        max_bytes_held: int | None = None,
        close_when_complete: bool = False,
        check_finite: bool = False,
        largest: float | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self._gradients = [group.trained for group in self.groups]
        self._numbers = {id(group): number for number, group in enumerate(self.groups)}
        checked = check_finite or largest is not None
        checks = GradientChecks(check_finite, largest) if checked else None
        self._settlement = Settlement(self.groups, scratch, checks)
        self._hooks = _HookCalls(self.groups)
        device = groups[0].device if groups else torch.device("cpu")
        has_streams = current_stream(device) is not None
        self._stream = BackwardStream(device) if has_streams else None
        self._queue = ReductionQueue(
            self.groups,
            order=order,
            overlap=overlap,
            max_in_flight=max_in_flight,
            max_bytes_in_flight=max_bytes_in_flight,
            max_bytes_held=max_bytes_held,
            stream=self._stream,
            started=None if checks is None else checks.note,
            done=self._hooks.call,
        )
        self._listener: Callable[[], BackwardListener | None] = lambda: None
        self.phase = ReducerPhase.IDLE
        """What it is doing. In `BACKWARD` one runs, or has raised and nobody has noticed yet."""
        self._is_waiting = False  # a last reduction is still to come; the same on all ranks
        self._end = BackwardEnd()
        hooks = [partial(self._hook, number) for number in range(len(self.groups))]
        self._leaves = list(map(hook_leaves, self.groups, hooks))
        # Of the backward at hand: how many leaves of each group it has come to, which groups wait
        # for the rest, and (if groups close when complete) which parameters got a gradient.
        self._reached = [0] * len(self.groups)
        self._closing: set[int] = set()
        self._arrived: list[set[int]] | None = None
        if close_when_complete:
            self._arrived = [set() for _ in self.groups]

    def tell(self, listener: BackwardListener) -> None:
        """Have `listener` (held weakly) told when a backward begins and ends."""
        self._listener = weakref.ref(listener)

    # -- which microbatch it is ---------------------------------------------------------------

    @property
    def is_final(self) -> bool:
        """Whether the current microbatch is the step's last."""
        return self._queue.is_final

    @property
    def max_bytes_in_flight(self) -> int | None:
        """Bytes of gradient buffers under way; None counts reductions."""
        return self._queue.max_bytes_in_flight

    def expect_final(self, final: bool) -> None:
        """Say whether backwards from here on are each a step's last microbatch."""
        self._queue.expect_final(final)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""
        return self._expecting(False)

    @contextmanager
    def _expecting(self, final: bool) -> Iterator[None]:
        before = self._queue.is_final
        self._queue.expect_final(final)
        try:
            yield
        finally:
            self._queue.expect_final(before)

    def reduce_once_per_step(self, once: bool) -> None:
        """Sum gradients over the inner axis in final backwards only, or as each group's strategy.

        A reduction that has a cadence of its own keeps it. RuntimeError: while gradients are
        accumulated.
        """
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            own = not once or group.settings.reduction.cadence is not None
            gradients.set_cadence(group.settings.cadence if own else Cadence.ONCE)

    @contextmanager
    def late_gradients(self) -> Iterator[None]:
        """Gradients that arrive inside belong to backwards that are over.

        A schedule that computes gradients of weights apart from those of inputs hands them to
        autograd's leaves later. They are summed over ranks by the next final backward, or by
        `start` and `finish`.

        ValueError says that the order of summation counts microbatches (`reproducible=True`).
        """
        if any(group.settings.reduction.cadence is not None for group in self.groups):
            raise ValueError(
                "reproducible=True adds the gradients of each microbatch in a fixed order, and "
                "late gradients belong to none: use a schedule that does not split backward "
                "(1f1b, interleaved_1f1b), or reproducible=False"
            )
        self.phase = ReducerPhase.LATE
        try:
            with self.no_sync():
                yield
        finally:
            self.phase = ReducerPhase.IDLE
        self._is_waiting = True
        self._show(final=False)

    # -- a backward ---------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """A gradient has reached the wrapper: begin a backward, unless this one has begun.

        It forgets what the user has zeroed. A backward that raised is abandoned first.

        RuntimeError: between `start` and `finish`, and after a backward that raised over gradients
        of earlier microbatches.
        """
        if self.phase is BACKWARD:
            if self._end.queued() is not None:
                return  # this one has begun: see Note [Who ends a backward]
            self.abandon_backward()  # another one raised, and this one's forward is old
        if self.phase is ReducerPhase.SYNCING:
            raise RuntimeError(
                "a backward began between start_grad_sync() and finish_grad_sync(): gradients are "
                "on their way from the buffers it would write to; call finish_grad_sync() first"
            )
        # The engine may refuse it, so nothing of the last backward is forgotten before.
        if self._stream is not None:
            self._stream.begin()
        if (listener := self._listener()) is not None:
            listener.backward_begins()
        for arrived in self._arrived or ():
            arrived.clear()
        self._reached = [0] * len(self.groups)
        self._closing.clear()
        self._hooks.begin()
        self._queue.open()
        last = self._queue.is_final
        # What the user has done to `.grad` since counts before anything is added to it.
        for group in self.groups:
            group.shown.follow_user()
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            if gradients.state is GradientState.FINALIZED and group.shown.holds_zeros:
                gradients.mark_zeroed()
            gradients.local.begin_backward(last)
        # Last of all: whatever raised above has begun no backward.
        self.phase = BACKWARD
        self._end.queue(self._end_backward)

    def _hook(self, number: int, index: int) -> LeafHook:
        """The hook on the leaves of one parameter, by the numbers of its group and in it.

        It refers to the reducer weakly, as the reducer holds the nodes that hold the hooks.
        """
        return partial(GradientReducer._take, weakref.ref(self), number, index)

    @staticmethod
    def _take(
        reducer: "weakref.ref[GradientReducer]",
        number: int,
        index: int,
        gradients: tuple[torch.Tensor | None],
    ) -> tuple[None] | None:
        """Autograd has brought a parameter's gradient, which belongs to the backward that runs.

        It comes from the compute parameter, or from the main one (a penalty, or a weight read
        outside its unit). There is none where a layer has written it to the bucket already.
        """
        if (self := reducer()) is None:
            return None  # the wrapper is gone: gradients go to `.grad`
        # Of a parameter that the loss reads beside all outputs (a penalty), this comes first.
        if self.phase is not BACKWARD or self._end.queued() is None:
            self._begin_by(number)
        group, local, gradient = self.groups[number], self._gradients[number].local, gradients[0]
        with NO_STREAM if self._stream is None else self._stream.entered(gradient):
            # That of a whole parameter is added where it is sent from, and summed over ranks. That
            # of this rank's span is the mean of all ranks' gradients there, and is kept beside.
            if isinstance(gradient, ShardedTensor):
                local.add_span(index, gradient, group.ranks_of_spans)
            elif gradient is not None:
                if gradient.layout is not torch.strided:
                    raise TypeError(
                        f"{group.refs[index].name} has a gradient of layout {gradient.layout}; "
                        "flat buffers hold strided gradients only: make it with sparse=False"
                    )
                local.add(index, gradient)
            self._reached[number] += 1
            if self._arrived is not None and (gradient is not None or index in local.by_layers):
                arrived = self._arrived[number]
                arrived.add(index)
                if len(arrived) == len(group.refs):
                    self._closing.add(number)
            # A group that waits for its last leaf goes on its way with it.
            if number in self._closing:
                self.close(group)
        return (None,)  # nothing is left for the node that would accumulate into `.grad`

    def _begin_by(self, number: int) -> None:
        """A gradient has come before any output of the wrapper: begin a backward, or none if late.

        Refused where a layer has written its gradient to the bucket already.
        """
        if self.phase is ReducerPhase.LATE:
            return
        idle = self.phase is ReducerPhase.IDLE
        if idle and any(gradients.local.by_layers for gradients in self._gradients):
            raise RuntimeError(
                f"a gradient came to {self.groups[number].refs[0].name} or its neighbours before "
                "the backward reached an output of the wrapper: call the wrapper, not the module "
                "inside it"
            )
        self.begin_backward()

    def abandon_if_raised(self) -> None:
        """Drop what a backward has left that raised; one that runs, in any thread, goes on."""
        if self.phase is BACKWARD and self._end.has_passed():
            self.abandon_backward()

    def abandon_backward(self) -> None:
        """A backward died half-way: drop what it left, unless that is mixed with earlier ones'."""
        self.phase = ReducerPhase.IDLE
        self._queue.abandon()
        self._settlement.forget()
        for gradients in self._gradients:
            gradients.local.abandon_backward()
        if (listener := self._listener()) is not None:
            listener.backward_is_over(raised=True)

    def _end_backward(self) -> None:
        """Reduce what is left, wait for all, and show the gradients to the optimizer."""
        listener, raised = self._listener(), True
        with NO_STREAM if self._stream is None else self._stream.entered(None):
            try:
                # Units that autograd has not left yet are complete now, so all groups close.
                if listener is not None:
                    listener.backward_ends()
                self._reduce_what_is_left()
                for gradients in self._gradients:
                    gradients.local.end_backward()
                self._settle()
                raised = False
            finally:
                self.phase = ReducerPhase.IDLE
                if listener is not None:
                    listener.backward_is_over(raised=raised)
        if self._stream is not None:
            self._stream.end()

    def _reduce_what_is_left(self) -> None:
        queue, final = self._queue, self._queue.is_final
        reduced = list(filter(queue.reduces, range(len(self.groups))))
        for number in reduced:
            gradients = self._gradients[number]
            # A group that no unit closed still takes part where the order is static, and
            # where an earlier microbatch left a sum that only the last one completes.
            unfinished = final and gradients.state is GradientState.PARTIAL
            if queue.order is Order.STATIC or gradients.local.exist or unfinished:
                queue.close(number)
            if number not in queue.closed:
                gradients.rank_sum.skip(final)
        queue.drain(0)
        # What reached a group after it was closed (reentrant recomputation can come back to a
        # unit without notice) was summed by no collective yet.
        for number in reduced:
            if self._gradients[number].local.exist:
                queue.issue(number)
        queue.drain(0)

    def _settle(self) -> None:
        """After all reductions: agree on who has a gradient, and show it."""
        final = self._queue.is_final
        self._is_waiting = not final
        if final:
            self._hooks.note_produced()
            listener = self._listener()
            gathers = GatherLog() if listener is None else listener.gathers
            self._settlement.settle(gathers, self._queue.issued)
            self._hooks.call_late()
        self._show(final=final)

    def _show(self, *, final: bool) -> None:
        for group in self.groups:
            group.shown.show(final=final)
            group.shown.note()

    # -- between backwards --------------------------------------------------------------------

    def start(self) -> None:
        """Issue the last reduction of gradients that `no_sync` left unfinished, without waiting."""
        if not self._is_waiting or self.phase is ReducerPhase.SYNCING:
            return
        for group in self.groups:
            group.shown.follow_user()
        self.phase = ReducerPhase.SYNCING
        with self._expecting(True):
            self._queue.open()
            for number in range(len(self.groups)):
                self._queue.close(number)

    def finish(self) -> None:
        """Finish what `start` issues, and show the gradients; nothing where all are final."""
        self.start()
        if self.phase is not ReducerPhase.SYNCING:
            return
        self.phase = ReducerPhase.IDLE
        with self._expecting(True):
            self._queue.drain(0)
            self._settle()

    def scale(self, factor: float) -> None:
        """Multiply all gradients, whether they are summed over ranks or not."""
        if self.phase is ReducerPhase.SYNCING:
            self.finish()
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            group.shown.follow_user()
            gradients.scale(factor)
            group.shown.note()

    # -- the order of reductions --------------------------------------------------------------

    def close(self, group: ParameterGroup) -> None:
        """The unit's gradients of this microbatch are there: reduce them when their turn comes.

        A loss that depends on a parameter elsewhere too (a penalty) may bring more. So the group
        waits until the backward has come to each of its leaves that it will come to.
        """
        number = self._numbers[id(group)]
        try:
            expected = sum(map(will_execute, self._leaves[number]))
        except RuntimeError:  # torch.autograd.grad takes a leaf's gradient, and none comes here
            expected = 0
        if self._reached[number] < expected:
            self._closing.add(number)
        else:
            self._queue.close(number)


class BackwardEnd:
    """Queues a function for the end of the backward at hand.

    Note [Who ends a backward]
        Autograd has no hook for "this backward has raised". It does drop the callbacks that were
        queued for the end when it unwinds, and nobody else holds them. So a weak reference to the
        newest callback tells a backward that goes on (the reference is alive) from one that has
        ended or raised. On a GPU autograd's own thread drops the callbacks, a moment after
        `backward()` has raised in the thread that called it. So who asks from outside of any
        backward waits for that moment.
    """

    def __init__(self) -> None:
        self.queued: Callable[[], object] = lambda: None
        """Gives the newest callback while it is still to be called, and then None."""

    def queue(self, end: Callable[[], None]) -> None:
        """Have `end` called when the backward that runs now has ended."""
        callback = partial(end)
        self.queued = weakref.ref(callback)
        queue_callback(callback)

    def has_passed(self) -> bool:
        """Whether the newest `end` was called, or dropped by a backward that raised."""
        latest = time.monotonic() + (_DROPPED_WITHIN if current_graph_task_id() == -1 else 0)
        while self.queued() is not None and time.monotonic() < latest:
            time.sleep(0.001)  # autograd's thread needs Python's lock to drop it
        return self.queued() is None

    @property
    def will_come(self) -> bool:
        """Whether the newest `end` is still to be called."""
        return self.queued() is not None
