"""The order in which gradients are summed over ranks, and the two ends of a backward.

Every rank issues the same collectives in the same order, whatever its autograd graph did. With
`Order.STATIC` a group that is ready waits for those before it in one fixed list, so that ranks
whose unused parameters differ stay in step. With `Order.AS_CLOSED` groups go in the order in
which they close: right where the weights' own gathers already force one order on all ranks.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial
from typing import Protocol

import torch

from lamina.buffers import ShardedTensor
from lamina.collectives import Handle
from lamina.collectives.engine import Serving
from lamina.ddp.backward.agreement import BadGradients, GradientChecks, ProducedFlags
from lamina.ddp.backward.grad_attribute import follow_user, holds_zeros
from lamina.ddp.backward.gradient_hooks import (
    NO_STREAM,
    BackwardStream,
    hook_gradients,
)
from lamina.ddp.compat import queue_callback, will_execute
from lamina.ddp.gradients.scratch import ScratchBuffers
from lamina.ddp.gradients.states import GradientState
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.parameters.facts import StepFacts, common_facts_of
from lamina.ddp.parameters.strategy import Cadence
from lamina.mesh.engine import MeshAxis

__all__ = [
    "BackwardEnd",
    "BackwardListener",
    "GradientReducer",
    "Order",
]


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


class BackwardListener(Protocol):
    """What a wrapper does at the two ends of a backward, beside the reductions."""

    def backward_begins(self) -> None:
        """The first gradient has arrived. May raise to refuse the backward."""
        ...

    def backward_ends(self) -> None:
        """Autograd is done; what is left will be reduced next. May `close` groups."""
        ...

    def backward_is_over(self, *, raised: bool) -> None:
        """All gradients are reduced and shown; or (`raised`) the backward was abandoned."""
        ...


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
        self.max_bytes_in_flight = max_bytes_in_flight
        self._max_bytes_held = max_bytes_held
        self._gradients = [group.trained for group in self.groups]
        for gradients in () if max_bytes_held is None else self._gradients:
            gradients.tell_before_buffers(self._make_room)
        self._numbers = {id(group): number for number, group in enumerate(self.groups)}
        self._scratch = scratch
        self._order = order
        self._overlap = overlap
        self._max_in_flight = max(1, max_in_flight)
        self._close_when_complete = close_when_complete
        self._checks = GradientChecks(check_finite, largest)
        self._listener: weakref.ref[BackwardListener] | None = None
        self._phase = ReducerPhase.IDLE
        self.is_final = True
        """Whether the current microbatch is the step's last."""
        self._step_facts = StepFacts()
        self._is_waiting = False  # a last reduction is still to come; the same on all ranks
        self._end = BackwardEnd()
        self._stream = BackwardStream(groups[0].device if groups else torch.device("cpu"))
        self._arrived: list[set[int]] = [set() for _ in self.groups]
        self._closed: set[int] = set()  # numbers of groups whose gradients are complete
        self._turns: deque[int] = deque()  # what `Order.STATIC` has still to issue, in its order
        self._in_flight: deque[tuple[Iterator[Handle], Handle, int, ParameterGroup]] = deque()
        self._by_axes: dict[tuple[MeshAxis, MeshAxis], list[ParameterGroup]] = {}
        self._produced: dict[tuple[MeshAxis, MeshAxis], ProducedFlags] = {}
        for group in self.groups:
            self._by_axes.setdefault((group.axes.outer, group.axes.inner), []).append(group)
        self._leaves = [hook_gradients(each, at, self) for at, each in enumerate(self.groups)]
        # Of the backward at hand: how many leaves it has come to, and who waits for the rest.
        self._reached = [0] * len(self.groups)
        self._closing: set[int] = set()
        self._hooks_called: dict[int, set[int]] = {}  # in the backward at hand, by group

    def tell(self, listener: BackwardListener) -> None:
        """Have `listener` (held weakly) told when a backward begins and ends."""
        self._listener = weakref.ref(listener)

    def _told(self) -> BackwardListener | None:
        return None if self._listener is None else self._listener()

    # -- which microbatch it is ---------------------------------------------------------------

    def expect_final(self, final: bool) -> None:
        """Say whether backwards from here on are each a step's last microbatch."""
        self.is_final = final

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside are not the step's last microbatch."""
        return self._expecting(False)

    @contextmanager
    def _expecting(self, final: bool) -> Iterator[None]:
        before, self.is_final = self.is_final, final
        try:
            yield
        finally:
            self.is_final = before

    def _reduces(self, number: int) -> bool:
        """Whether a group's gradients of the current microbatch go over the wire."""
        return self.is_final or self._gradients[number].cadence is Cadence.EVERY_MICROBATCH

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
        self._phase = ReducerPhase.LATE
        try:
            with self.no_sync():
                yield
        finally:
            self._phase = ReducerPhase.IDLE
        self._is_waiting = True
        self._show(final=False)

    # -- a backward ---------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, or has raised and nobody has noticed yet."""
        return self._phase is ReducerPhase.BACKWARD

    def begin_backward(self) -> None:
        """A gradient has reached the wrapper: begin a backward, unless this one has begun.

        It forgets what the user has zeroed. A backward that raised is abandoned first.

        RuntimeError: between `start` and `finish`, and after a backward that raised over gradients
        of earlier microbatches.
        """
        if self._phase is ReducerPhase.BACKWARD:
            if self._end.queued() is not None:
                return
            self.abandon_backward()  # another one raised, and this one's forward is old
        if self._phase is ReducerPhase.SYNCING:
            raise RuntimeError(
                "a backward began between start_grad_sync() and finish_grad_sync(): gradients are "
                "on their way from the buffers it would write to; call finish_grad_sync() first"
            )
        self._stream.begin()
        if (listener := self._told()) is not None:
            listener.backward_begins()
        self._in_flight.clear()
        for arrived in self._arrived:
            arrived.clear()
        self._reached = [0] * len(self.groups)
        self._closing.clear()
        self._hooks_called.clear()
        self._open_all()
        for group in self.groups:
            follow_user(group)
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            if gradients.state is GradientState.FINALIZED and holds_zeros(group):
                gradients.mark_zeroed()
            gradients.begin_backward(self.is_final)
        self._phase = ReducerPhase.BACKWARD
        self._end.queue(self._end_backward)

    def take_gradient(self, number: int, index: int, gradient: torch.Tensor | None) -> None:
        """Autograd has brought a parameter's gradient, which belongs to the backward that runs.

        It comes from the compute parameter, or from the main one (a penalty, or a weight read
        outside its unit). That of a whole parameter is summed over ranks. One of this rank's span
        is the mean of all ranks' gradients there; see `GroupGradients.accumulate_span`.
        """
        if self._phase is not ReducerPhase.BACKWARD or self._end.queued() is None:
            self._begin_by(number)
        group, gradients = self.groups[number], self._gradients[number]
        with NO_STREAM if self._stream.stream is None else self._stream.entered(gradient):
            if isinstance(gradient, ShardedTensor):
                gradients.accumulate_span(index, gradient, group.ranks_of_spans)
            elif gradient is not None:
                if gradient.layout is not torch.strided:
                    raise TypeError(
                        f"{group.refs[index].name} has a gradient of layout {gradient.layout}; "
                        "flat buffers hold strided gradients only: make it with sparse=False"
                    )
                gradients.accumulate(index, gradient)
            self._reached[number] += 1
            if self._close_when_complete and (gradient is not None or index in gradients.by_layers):
                arrived = self._arrived[number]
                arrived.add(index)
                if len(arrived) == len(group.refs):
                    self._closing.add(number)
            if number in self._closing:
                self.close(group)

    def _begin_by(self, number: int) -> None:
        """A gradient has come before any output of the wrapper: begin a backward, or none if late.

        Refused where a layer has written its gradient to the bucket already.
        """
        if self._phase is ReducerPhase.LATE:
            return
        idle = self._phase is ReducerPhase.IDLE
        if idle and any(gradients.by_layers for gradients in self._gradients):
            raise RuntimeError(
                f"a gradient came to {self.groups[number].refs[0].name} or its neighbours before "
                "the backward reached an output of the wrapper: call the wrapper, not the module "
                "inside it"
            )
        self.begin_backward()

    def abandon_if_raised(self) -> None:
        """Drop what a backward has left that raised; one that runs, in any thread, goes on."""
        if self.in_backward and not self._end.will_come:  # see Note [Who ends a backward]
            self.abandon_backward()

    def abandon_backward(self) -> None:
        """A backward died half-way: drop what it left, unless that is mixed with earlier ones'."""
        self._phase = ReducerPhase.IDLE
        for _, handle, *_ in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._checks.forget()
        for gradients in self._gradients:
            gradients.abandon_backward()
        if (listener := self._told()) is not None:
            listener.backward_is_over(raised=True)

    def _end_backward(self) -> None:
        """Reduce what is left, wait for all, and show the gradients to the optimizer."""
        listener, raised = self._told(), True
        with NO_STREAM if self._stream.stream is None else self._stream.entered(None):
            try:
                if listener is not None:
                    listener.backward_ends()
                self._reduce_what_is_left()
                for gradients in self._gradients:
                    gradients.end_backward()
                self._settle()
                raised = False
            finally:
                self._phase = ReducerPhase.IDLE
                if listener is not None:
                    listener.backward_is_over(raised=raised)
        if self._stream.stream is not None:
            self._stream.end()

    def _reduce_what_is_left(self) -> None:
        reduced = list(filter(self._reduces, range(len(self.groups))))
        for number in reduced:
            gradients = self._gradients[number]
            # A group that no unit closed still takes part where the order is static, and
            # where an earlier microbatch left a sum that only the last one completes.
            unfinished = self.is_final and gradients.state is GradientState.PARTIAL
            if self._order is Order.STATIC or gradients.has_local or unfinished:
                self._close(number)
            if number not in self._closed:
                gradients.skip(self.is_final)
        self._drain(0)
        # What reached a group after it was closed (reentrant recomputation can come back to a
        # unit without notice) was summed by no collective yet.
        for number in reduced:
            if self._gradients[number].has_local:
                self._issue(number)
        self._drain(0)

    def _settle(self) -> None:
        """After all reductions: agree on who has a gradient, and show it."""
        self._is_waiting = not self.is_final
        if self.is_final:
            for number, called in self._hooks_called.items():
                produced = self._gradients[number].produced_gradient
                self._gradients[number].mark_produced(
                    [flag or index in called for index, flag in enumerate(produced)]
                )
            step, bad, told = self._step_facts.of(self.groups), self._checks.look(), BadGradients()
            for key, groups in self._by_axes.items():
                if key not in self._produced:
                    axes, device = groups[0].axes, groups[0].device
                    common = common_facts_of("at the end of a backward", axes, device)
                    self._produced[key] = ProducedFlags(groups, axes.groups("reduce"), common)
                told = max(told, self._produced[key].agree(step, bad))
            told.refuse()
            self._call_late_hooks()
            self._scratch.clear()
        self._show(final=self.is_final)

    def _show(self, *, final: bool) -> None:
        for group in self.groups:
            group.show_gradients(final=final)
            group.note_reduced()

    # -- between backwards --------------------------------------------------------------------

    def start(self) -> None:
        """Issue the last reduction of gradients that `no_sync` left unfinished, without waiting."""
        if not self._is_waiting or self._phase is ReducerPhase.SYNCING:
            return
        for group in self.groups:
            follow_user(group)
        self._phase = ReducerPhase.SYNCING
        with self._expecting(True):
            self._open_all()
            for number in range(len(self.groups)):
                self._close(number)

    def finish(self) -> None:
        """Finish what `start` issues, and show the gradients; nothing where all are final."""
        self.start()
        if self._phase is not ReducerPhase.SYNCING:
            return
        self._phase = ReducerPhase.IDLE
        with self._expecting(True):
            self._drain(0)
            self._settle()

    def scale(self, factor: float) -> None:
        """Multiply all gradients, whether they are summed over ranks or not."""
        if self._phase is ReducerPhase.SYNCING:
            self.finish()
        for group, gradients in zip(self.groups, self._gradients, strict=True):
            follow_user(group)
            gradients.scale(factor)
            group.note_reduced()

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
            self._close(number)

    def _open_all(self) -> None:
        self._closed.clear()
        if self._order is Order.STATIC:
            self._turns = deque(filter(self._reduces, range(len(self.groups))))

    def _close(self, number: int) -> None:
        if number in self._closed or not self._reduces(number):
            return
        self._closed.add(number)
        if self._order is Order.AS_CLOSED:
            self._issue(number)
            return
        while self._turns and self._turns[0] in self._closed:
            self._issue(self._turns.popleft())

    def _issue(self, number: int) -> None:
        group, gradients = self.groups[number], self._gradients[number]
        self._checks.note(group)
        leave = self._max_in_flight - 1
        if self.max_bytes_in_flight is not None:
            leave = self._room_for(gradients.wire_bytes, self.max_bytes_in_flight)
        if len(self._in_flight) > leave:
            self._drain(leave)
        steps = gradients.reduce(self.is_final)
        with Serving(group.weights.title):
            handle = next(steps, None)
        if handle is not None:
            self._in_flight.append((steps, handle, gradients.wire_bytes, group))
        elif group.has_user_hooks:  # one rank alone may have nothing to wait for
            self._call_hooks(group)
        if not self._overlap:
            self._drain(0)

    def _room_for(self, nbytes: int, limit: int) -> int:
        """How many of the newest reductions may go on beside another one, within `limit` bytes."""
        left, count = limit - nbytes, 0
        for *_, held, _ in reversed(self._in_flight):
            left -= held
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
        held = nbytes
        for flight in self._in_flight:
            held += flight[2]
        while self._in_flight and held > (self._max_bytes_held or 0):
            *_, oldest, group = self._in_flight[0]
            elsewhere = self._stream.stream is not None and not self._stream.is_current
            if elsewhere or not group.trained.ends_alone:
                return
            self._drain(len(self._in_flight) - 1)
            held -= oldest

    def _drain(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            steps, handle, _, group = self._in_flight.popleft()
            handle.wait()
            with Serving(group.weights.title):
                for further in steps:
                    further.wait()
            if group.has_user_hooks:
                self._call_hooks(group)

    def _call_hooks(self, group: ParameterGroup) -> None:
        """A group's gradients are summed: call users' hooks, and free what these have dropped.

        A parameter without a gradient on this rank may have one on another. Nobody knows before the
        end of the backward, so its hooks are called there.
        """
        if not self.is_final:
            return
        gradients = group.trained
        called = self._hooks_called.setdefault(self._numbers[id(group)], set())
        if called:
            raise RuntimeError(
                f"a gradient came to {group.refs[min(called)].name} or its neighbours after their "
                "hooks were called with the final one: use torch.utils.checkpoint with "
                "use_reentrant=False, or let an optimizer step after the backward"
            )
        group.show_gradients()
        group.call_user_hooks(called)
        gradients.forget_squares()
        if len(called) == len(group.refs):
            group.release_zeroed_gradients()

    def _call_late_hooks(self) -> None:
        """All ranks know by now which parameters have a gradient, from this rank or from others."""
        for number, called in self._hooks_called.items():
            group, gradients = self.groups[number], self._gradients[number]
            mains = group.main_parameters
            for index, produced in enumerate(gradients.produced_gradient):
                if produced and index not in called:
                    mains[index].grad = group.gradient_views[index]
            group.call_user_hooks(called)
            gradients.forget_squares()
            gradients.mark_produced([main.grad is not None for main in mains])
            group.release_zeroed_gradients()


class BackwardEnd:
    """Queues a function for the end of the backward at hand.

    Note [Who ends a backward]
        Autograd has no hook for "this backward has raised". It does drop the callbacks that were
        queued for the end when it unwinds, and nobody else holds them. So a weak reference to the
        newest callback tells a backward that goes on (the reference is alive) from one that has
        ended or raised.
    """

    def __init__(self) -> None:
        self.queued: Callable[[], object] = lambda: None
        """Gives the newest callback while it is still to be called, and then None."""

    def queue(self, end: Callable[[], None]) -> None:
        """Have `end` called when the backward that runs now has ended."""
        held = partial(end)
        self.queued = weakref.ref(held)
        queue_callback(held)

    @property
    def will_come(self) -> bool:
        """Whether the newest `end` is still to be called."""
        return self.queued() is not None
