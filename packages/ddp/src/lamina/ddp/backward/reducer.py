"""The order in which gradients are summed over ranks, and the two ends of a backward.

Every rank issues the same collectives in the same order, whatever its autograd graph did. With
`Order.STATIC` a group that is ready waits for those before it in one fixed list, so that ranks
whose unused parameters differ stay in step. With `Order.AS_CLOSED` groups go in the order in
which they close: right where the weights' own gathers already force one order on all ranks.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial

import torch
from torch.distributed import ProcessGroup

from lamina.collectives import Handle
from lamina.collectives.engine import all_reduce_small, host_device
from lamina.ddp.backward.grad_attribute import follow_user, holds_zeros
from lamina.ddp.backward.gradient_hooks import Weakly, gradient_mover, offer_sink
from lamina.ddp.gradients.group_gradients import GroupGradients
from lamina.ddp.gradients.scratch import TransientBuffers
from lamina.ddp.gradients.sums import GradientState
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.group.weights import shares_storage
from lamina.ddp.parameters.strategy import Cadence
from lamina.mesh.engine import MeshAxis

__all__ = [
    "BackwardEnd",
    "GradientReducer",
    "LargeGradientError",
    "NonFiniteGradientError",
    "Order",
    "agree_on_seen",
]


class NonFiniteGradientError(RuntimeError):
    """A gradient holds NaN or infinity before it was sent to other ranks."""


class LargeGradientError(RuntimeError):
    """A gradient's magnitude exceeds the limit that was set."""


class Order(Enum):
    """Which order of reductions all ranks follow."""

    STATIC = "static"
    AS_CLOSED = "as_closed"


class GradientReducer:
    """Sums the gradients of groups over ranks while backward goes on.

    Args:
        groups: groups with requires_grad, in the order of `Order.STATIC`.
        cadence: whether every microbatch is reduced, or only the last.
        transient: the pool that the groups' short-lived buffers come from.
        order: see `Order`.
        overlap: reduce while backward goes on; otherwise each reduction is waited for at once.
        max_in_flight: reductions not yet waited for; each holds one gradient buffer.
        max_bytes_in_flight: bytes of those buffers instead; None counts reductions. One is always
            let go.
        close_when_complete: close a group as soon as each of its parameters got a gradient in this
            backward, for wrappers without units. A gradient that comes later still (a module that
            reentrant recomputation runs twice) is summed at the end of the backward.
        check_finite: look for NaN and infinity in each gradient before it is sent.
        largest: refuse gradients of a larger magnitude; None does not look.
        begin: gives what begins a backward, for gradients that come before anybody has called
            `begin_backward`; None for wrappers that always have.
    """

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        cadence: Cadence,
        transient: TransientBuffers,
        *,
        order: Order = Order.STATIC,
        overlap: bool = True,
        max_in_flight: int = 2,
        max_bytes_in_flight: int | None = None,
        close_when_complete: bool = False,
        check_finite: bool = False,
        largest: float | None = None,
        begin: Weakly[Callable[[], None]] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.is_final = True
        """Whether the current microbatch is the step's last (`no_sync` clears it)."""
        self._cadence = cadence
        self._transient = transient
        self._order = order
        self._overlap = overlap
        self._max_in_flight = max(1, max_in_flight)
        self.max_bytes_in_flight = max_bytes_in_flight
        self._check_finite = check_finite
        self._largest = largest
        self.in_backward = False
        """Between `begin_backward` and the end of that backward."""
        self.ending = BackwardEnd()
        self._begin = begin
        self._late = False
        self._unfinished = False
        self._started = False
        self._arrived: list[set[int]] = [set() for _ in self.groups]
        self._waiting: deque[ParameterGroup] = deque()
        self._ready: set[int] = set()
        self._in_flight: deque[tuple[Iterator[Handle], Handle, int]] = deque()
        announce = weakref.WeakMethod(self._announce)
        close = weakref.WeakMethod(self._close_place)
        for place, group in enumerate(self.groups):
            complete = _closing(close, place) if close_when_complete else None
            for index, ref in enumerate(group.refs):
                parameter = ref.parameter
                mover = gradient_mover(
                    group.trained, index, ref.name, self._arrived[place], announce, complete
                )
                parameter.register_post_accumulate_grad_hook(mover)  # type: ignore[no-untyped-call]
                offer_sink(parameter, group, index)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the step's last microbatch."""
        before, self.is_final = self.is_final, False
        try:
            yield
        finally:
            self.is_final = before

    @contextmanager
    def late_gradients(self) -> Iterator[None]:
        """Gradients that arrive inside belong to backwards that are over.

        A schedule that computes gradients of weights apart from those of inputs hands them to
        autograd's leaves later. They are summed over ranks by the next final backward, or by
        `start` and `finish`.

        Raises:
            ValueError: if the order of summation counts microbatches (`reproducible=True`).
        """
        if any(group.settings.reduction.cadence is not None for group in self.groups):
            raise ValueError(
                "reproducible=True adds the gradients of each microbatch in a fixed order, and "
                "late gradients belong to none: use a schedule that does not split backward "
                "(1f1b, interleaved_1f1b), or reproducible=False"
            )
        for group in self.groups:
            for parameter in group.compute_parameters:
                parameter.grad = None
        self._late = True
        try:
            with self.no_sync():
                yield
        finally:
            self._late = False
        self._unfinished = True
        for group in self.groups:
            group.show_gradients(final=False)
            group.note_reduced()

    def set_cadence(self, cadence: Cadence) -> None:
        """Choose how often gradients are summed over the inner axis, between two steps.

        Raises:
            RuntimeError: while gradients are accumulated.
        """
        for group in self.groups:
            group.trained.set_cadence(cadence)
        self._cadence = cadence

    def begin_backward(self) -> None:
        """Forget what the user zeroed, and take autograd's `.grad` slots for this backward.

        Raises:
            RuntimeError: between `start` and `finish`, and after a backward that raised over
                gradients of earlier microbatches.
        """
        if self._started:
            raise RuntimeError(
                "a backward began between start_grad_sync() and finish_grad_sync(): gradients are "
                "on their way from the buffers it would write to; call finish_grad_sync() first"
            )
        self._in_flight.clear()
        self._ready.clear()
        self._started = False
        for arrived in self._arrived:
            arrived.clear()
        self._waiting = deque(self.groups if self._order is Order.STATIC else ())
        for group in self.groups:
            follow_user(group)
        for group in self.groups:
            gradients = group.trained
            gradients.finalised = gradients.finalised and not holds_zeros(group)
            emptied = group.main_parameters[0] is group.compute_parameters[0]
            gradients.begin_backward(self.is_final, emptied=emptied)
            for parameter in group.compute_parameters:
                parameter.grad = None
        self.in_backward = True

    def abandon_backward(self) -> None:
        """A backward died half-way: drop what it left, unless that is mixed with earlier ones'."""
        self.in_backward = False
        for _, handle, _ in self._in_flight:
            handle.wait()
        self._in_flight.clear()
        self._ready.clear()
        self._waiting.clear()
        for group in self.groups:
            group.trained.abandon_backward()

    def close(self, group: ParameterGroup) -> None:
        """A group's gradients of this microbatch are complete: reduce it when its turn comes."""
        if not self.reduces_now or id(group) in self._ready:
            return
        if self._order is Order.AS_CLOSED:
            self._ready.add(id(group))
            self._issue(group)
            return
        self._ready.add(id(group))
        while self._waiting and id(self._waiting[0]) in self._ready:
            self._issue(self._waiting.popleft())

    @property
    def reduces_now(self) -> bool:
        """Whether gradients of the current microbatch go over the wire."""
        return self.is_final or self._cadence is Cadence.EVERY_MICROBATCH

    def end_backward(self) -> None:
        """Reduce what is left, wait for all, and show the gradients to the optimizer."""
        self.in_backward = False
        if self.reduces_now:
            for group in self.groups:
                gradients = group.trained
                # A group that no unit closed still takes part where the order is static, and
                # where an earlier microbatch left a sum that only the last one completes.
                unfinished = self.is_final and gradients.state is GradientState.PARTIAL
                if self._order is Order.STATIC or gradients.has_local or unfinished:
                    self.close(group)
                if id(group) not in self._ready:
                    gradients.skip(self.is_final)
            self._drain(0)
            # What reached a group after it was closed (reentrant recomputation can come back to a
            # unit without notice) was summed by no collective yet.
            for group in self.groups:
                if group.trained.has_local:
                    self._issue(group)
            self._drain(0)
        self._settle()

    def _settle(self) -> None:
        """After all reductions of a backward: agree on who has a gradient, and show it."""
        for group in self.groups:
            group.trained.end_backward()
        if self.is_final:
            self._exchange_seen()
            self._transient.clear()
        self._unfinished = not self.is_final
        for group in self.groups:
            group.show_gradients(final=self.is_final)
            group.note_reduced()

    def start(self) -> None:
        """Issue the last reduction of gradients that `no_sync` left unfinished, without waiting."""
        if not self._unfinished or self._started:
            return
        for group in self.groups:
            follow_user(group)
        self._started = True
        self._ready.clear()
        self._waiting = deque(self.groups)
        with self._final():
            for group in self.groups:
                self.close(group)

    def finish(self) -> None:
        """Finish what `start` issues, and show the gradients; nothing where all are final."""
        self.start()
        if self._started:
            self._started = False
            with self._final():
                self._drain(0)
                self._settle()

    @contextmanager
    def _final(self) -> Iterator[None]:
        before, self.is_final = self.is_final, True
        try:
            yield
        finally:
            self.is_final = before

    def scale(self, factor: float) -> None:
        """Multiply all gradients, whether they are summed over ranks or not."""
        if self._started:
            self.finish()
        for group in self.groups:
            follow_user(group)
            group.trained.scale(factor)
            group.note_reduced()

    def _close_place(self, place: int) -> None:
        self.close(self.groups[place])

    def _announce(
        self, gradients: GroupGradients, name: str, gradient: torch.Tensor | None
    ) -> None:
        """A gradient has come: the first of a backward that no output announced begins it."""
        begin = self._begin() if self._begin is not None else None
        if begin is None or self._late:
            return
        if self.in_backward:
            begin()  # nothing, unless that backward died
            return
        main = gradients.main
        added = gradient is not None and main.has_memory and shares_storage(gradient, main.data)
        if added or any(group.trained.sunk for group in self.groups):
            raise RuntimeError(
                f"a gradient came to {name} before the backward reached an output of the wrapper: "
                "call the wrapper, not the module inside it; add a term of the loss that depends "
                "on parameters alone (a penalty) in the module's forward, or to the step's first "
                "microbatch"
            )
        begin()

    def _issue(self, group: ParameterGroup) -> None:
        gradients = group.trained
        if self._check_finite:
            _refuse_nonfinite(group)
        if self._largest is not None:
            _refuse_large(group, self._largest)
        self._drain(self._room_for(gradients.wire_bytes))
        steps = gradients.reduce(self.is_final)
        handle = next(steps, None)
        if handle is not None:  # one rank alone may have nothing to wait for
            self._in_flight.append((steps, handle, gradients.wire_bytes))
        if not self._overlap:
            self._drain(0)

    def _room_for(self, nbytes: int) -> int:
        """How many of the newest reductions may go on beside another one."""
        if self.max_bytes_in_flight is None:
            return self._max_in_flight - 1
        left, count = self.max_bytes_in_flight - nbytes, 0
        for *_, held in reversed(self._in_flight):
            left -= held
            if left < 0:
                break
            count += 1
        return count

    def _drain(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            steps, handle, _ = self._in_flight.popleft()
            handle.wait()
            for further in steps:
                further.wait()

    def _exchange_seen(self) -> None:
        """Agree over ranks on which parameters got a gradient anywhere (one small collective)."""
        by_axes: dict[tuple[MeshAxis, MeshAxis], list[ParameterGroup]] = {}
        for group in self.groups:
            by_axes.setdefault((group.axes.outer, group.axes.inner), []).append(group)
        for groups in by_axes.values():
            agree_on_seen(groups, groups[0].axes.groups("reduce"))


def _closing(close: Weakly[Callable[[int], None]], place: int) -> Callable[[], None]:
    def complete() -> None:
        if (method := close()) is not None:
            method(place)

    return complete


def _refuse_large(group: ParameterGroup, limit: float) -> None:
    gradients = group.trained
    for index, written in enumerate(gradients.written):
        view = gradients.view(index)
        largest = float(view.abs().max()) if written and view.numel() else 0.0
        if not largest <= limit:  # NaN too
            raise LargeGradientError(
                f"gradient of {group.refs[index].name} reaches {largest:.3g} on {group.axes.here}, "
                f"above check_for_large_grads={limit:.3g}: look at this rank's batch, clip, or "
                "raise the limit. Other ranks wait for this one until it ends"
            )


def _refuse_nonfinite(group: ParameterGroup) -> None:
    gradients = group.trained
    for index, written in enumerate(gradients.written):
        if written and not bool(torch.isfinite(gradients.view(index)).all()):
            raise NonFiniteGradientError(
                f"gradient of {group.refs[index].name} is not finite on {group.axes.here} before "
                "its reduction: look at this rank's batch, or lower the learning rate or loss "
                "scale. Other ranks wait for this one until it ends"
            )


class BackwardEnd:
    """Queues a function for the end of the backward at hand.

    Autograd alone holds what is queued, and lets go of it when the backward raises. So who has
    queued an end and was not called can tell a backward that goes on from one that died.
    """

    def __init__(self) -> None:
        self._queued: weakref.ref[Callable[[], None]] | None = None

    def queue(self, end: Callable[[], None]) -> None:
        """Have `end` called when the backward that runs now has ended."""
        held = partial(end)
        self._queued = weakref.ref(held)
        torch.autograd.Variable._execution_engine.queue_callback(held)

    @property
    def will_come(self) -> bool:
        """Whether the newest `end` is still to be called."""
        return self._queued is not None and self._queued() is not None


def agree_on_seen(groups: Sequence[ParameterGroup], over: Iterable[ProcessGroup | None]) -> None:
    """A parameter that got a gradient on one rank got one on all: one small collective per group.

    Args:
        groups: alike on all those ranks, one at least.
        over: the ranks, by process groups; None is one rank alone, which asks nobody.
    """
    several = [one for one in over if one is not None]
    if not several:
        return
    seen = [flag for group in groups for flag in group.trained.seen]
    flags = torch.tensor(seen, dtype=torch.int32, device=host_device(several, groups[0].device))
    for one in several:
        all_reduce_small([flags], one, op="max")
    merged = iter(flags.tolist())
    for group in groups:
        group.trained.seen = [bool(next(merged)) for _ in group.refs]
