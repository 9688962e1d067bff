"""A unit: parameter groups whose whole weights come and go together.

A unit has no state of its own for that. Its groups' weights know whether they are there, and what
modules hold (`lamina.ddp.group.weights.WeightsState`). What a unit knows is which of its forwards
and backwards are still to come, and whether gradients are coming now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch
from torch import nn

from lamina.collectives.engine import Span, profiling
from lamina.ddp.backward.gradient_hooks import AT_REST, IN_GRAPH
from lamina.ddp.compat import graph_is_kept
from lamina.ddp.group.group import ParameterGroup
from lamina.ddp.group.weights import COMING, IN_USE, LIVE, Weights


class UnavailableError(NotImplementedError):
    """An argument or a call asks for what this machine or this build of Lamina does not have."""


class Dress(Protocol):
    """Another form in which modules see a unit's compute parameters, for one forward."""

    def show(self) -> None:
        """Let modules hold the parameters in that form."""

    def hide(self) -> None:
        """Let modules hold the compute parameters again."""


class PendingBackward:
    """One forward of a unit whose backward is still to come.

    It lives on the autograd graph and nowhere else: when the graph is freed without a backward
    (a discarded loss, a recomputation), it is gone, and nobody waits for it.
    """

    __slots__ = ("__weakref__", "_pending")

    def __init__(self, pending: set[weakref.ref[PendingBackward]]) -> None:
        self._pending = pending  # of its unit
        self.expect()

    def expect(self) -> None:
        """Autograd will come back to this forward, maybe again."""
        # By a weak reference that takes itself away: a graph that is freed without a backward, as
        # of a loss that was only printed, must not keep the unit waiting.
        self._pending.add(weakref.ref(self, self._pending.discard))

    def came_back(self) -> None:
        """It has."""
        self._pending.discard(weakref.ref(self))


class WaitingGraphs:
    """Graphs whose backward is still to come, or that were kept for another one.

    While one waits, main parameters answer `torch.autograd.grad` in their compute parameters'
    place; see Note [autograd.grad of main parameters] in `lamina.ddp.backward.gradient_hooks`.
    """

    def __init__(self, groups: Iterable[ParameterGroup]) -> None:
        # Those that modules hold outside of forwards, where a user's code may name them.
        apart = [group.main_parameters for group in groups if group.mains_are_separate]
        self._mains = list(chain.from_iterable(apart))
        self.kept = False
        """Whether the newest backward keeps its graph: another may come to the same storage."""
        self._waits = False
        self._kept_ones = weakref.WeakSet[PendingBackward]()

    def wait(self, waits: bool = True) -> None:
        """A forward of training has ended: main parameters find their leaves in its graph."""
        classes = IN_GRAPH if waits else AT_REST
        for main in self._mains:
            main.__class__ = classes.get(type(main), type(main))
        self._waits = waits

    def begin(self) -> None:
        """A forward or a backward of the model begins."""
        if self._waits:
            self.wait(False)

    def begin_backward(self) -> None:
        """A backward begins, and says whether it keeps its graph."""
        self.begin()
        self.kept = graph_is_kept()
        # It may be another one over a kept graph: units are there until all of its calls are back.
        for pending in self._kept_ones:
            pending.expect()

    def expect_no_more(self) -> None:
        """The backward has come to all of the kept graphs that it comes to."""
        for pending in self._kept_ones:
            pending.came_back()

    def came_back(self, pending: PendingBackward) -> None:
        """The backward has come to the end of a unit's part of its graph."""
        if self.kept:
            self._kept_ones.add(pending)
        elif self._kept_ones:
            self._kept_ones.discard(pending)

    def end_backward(self, *, waits: bool) -> None:
        """It is over; `waits` says that other graphs wait."""
        if waits or self._kept_ones:
            self.wait()


class UnitCalls:
    """A unit's forwards, and which of their backwards are still to come.

    So many `members` that are called are one unit (`shard_module` of a list).
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self._ran: set[int] = set()
        """The members that have run since all had."""
        self._coming: set[int] = set()
        """Of several members, those whose backward may be yet to come."""
        self._without_grad = 0
        """Runs with gradients off in the newest forwards of the model: reentrant recomputation will
        come back to each of them, one at a time and without notice."""
        self._ends_unseen = False
        """Whether a call had no input that needs a gradient: nothing tells when its backward ends,
        but the end of the whole backward."""
        self.come_back_unannounced = False
        """Whether a call has returned no tensor that a gradient can come to, as of a module that
        leaves its result in an object it was given. Nothing tells when its backward begins, so the
        weights stay where they are until the whole backward has ended."""
        self._counted = False
        """Whether the next forward is the first of the newest: a backward or evaluation has ended
        since the last."""
        self._pending: set[weakref.ref[PendingBackward]] = set()

    def new_forward(self) -> None:
        """A forward of the whole model begins."""
        if self._counted:
            self._without_grad, self._counted = 0, False
        self._ran.clear()

    def run_without_grad(self) -> None:
        """One of the unit's modules is about to run with gradients off."""
        self._without_grad += 1

    def member_ran(self, member: int) -> bool:
        """One of several modules has run: whether all of them have, since this was so last."""
        self._ran.add(member)
        complete = len(self._ran) == self.members
        if complete:  # the next call of any of them begins another round
            self._ran.clear()
        return complete

    def expect(self) -> PendingBackward:
        """Note a forward that autograd will come back to; the caller puts it on the graph."""
        return PendingBackward(self._pending)

    def expect_unseen(self) -> None:
        """Autograd will come back to a call, and not through its inputs."""
        self._ends_unseen = True

    def expect_unannounced(self) -> None:
        """Autograd may come back to a call, and not through its outputs."""
        self.come_back_unannounced = True

    def expect_member(self, member: int) -> None:
        """Gradients may come to outputs of one of several modules."""
        self._coming.add(member)

    def member_came_back(self, member: int) -> None:
        """They have come."""
        self._coming.discard(member)

    def end_evaluation(self) -> None:
        """Nothing comes back to the runs of a forward without gradients."""
        self._counted = True

    def end_backward(self) -> None:
        """What has not come by now does not come in this backward."""
        self._counted = True
        self._ends_unseen = self.come_back_unannounced = False
        self._coming.clear()

    @property
    def expects_more(self) -> bool:
        """Whether some forward's backward has not run yet, or may be yet to come."""
        return self._without_grad > 1 or self._ends_unseen or bool(self._pending or self._coming)

    @property
    def hands_gradients_on(self) -> bool:
        """Whether some call had inputs that need gradients, and its backward has not run yet."""
        return bool(self._pending)


class Unit:
    """Parameters that are gathered and given back together.

    `name` is that of the unit in the model, "" for the root, and `module_class` that of its module,
    of which nothing is held, because a module holds its engine through its hooks. Modules hold the
    compute parameters of `groups` while they compute, in the form of `dress` if there is one. So
    many `members` that are called are one unit.
    """

    def __init__(
        self,
        name: str,
        module_class: str,
        groups: Sequence[ParameterGroup],
        *,
        members: int = 1,
        dress: Dress | None = None,
    ) -> None:
        self.name = name
        self.module_class = module_class
        self.groups = tuple(groups)
        self.gathered: tuple[Weights, ...] = tuple(
            group.weights for group in groups if group.weights.are_given_back
        )
        """Those of the groups' weights that come and go."""
        self.dress = dress
        self.calls = UnitCalls(members)
        self.in_backward = False
        """Whether gradients are coming. The engine takes nothing away before the last has come."""
        self.reshard_after_forward: bool | None = None
        """Whether to give whole weights back between forward and backward, as far as somebody has
        said so. Otherwise the root keeps them, and other units do not."""
        self.unshard_in_backward = True
        """Whether backward reads the weights, as all but embeddings' do."""
        self.prefetch: dict[int, tuple[Unit, ...]] = {}
        """Units to gather when this one's forward (1) or backward (-1) begins, where somebody said
        so; otherwise the recorded order says it."""
        self.stays_whole = False
        """Whether it is given back at the end of a step only (`keep_for_step`)."""
        self._before_gather: Callable[[Unit], None] | None = None
        # Spans, and not events of torch: they begin and end in different functions.
        self.forward, self._backward = Span(), Span()
        """Its computing, in a profile."""

    @property
    def title(self) -> str:
        """The unit's name, for messages."""
        return self.name or "the root"

    def rename(self, paths: Mapping[int, str]) -> None:
        """Give the unit and its parameters their names in the model around it, from its modules'.

        Of several modules, the parameters' names so far begin with the module's number.
        """
        self.name = next(iter(paths.values()))

        def whole(name: str) -> str:
            """The name of a parameter in the model around the unit."""
            path = paths.get(0, "")
            if len(paths) > 1:
                number, name = name.split(".", 1)
                path = paths[int(number)]
            return f"{path}.{name}" if path else name

        # The group owns the names; weights, records and errors get them from it.
        for group in self.groups:
            group.rename([whole(ref.name) for ref in group.refs])

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole weights that come and go."""
        return sum(weights.full.numel() * weights.full.itemsize for weights in self.gathered)

    @property
    def live_bytes(self) -> int:
        """Bytes of those of them that are there, or on their way."""
        live = (weights.full for weights in self.gathered if weights.state in LIVE)
        return sum(full.numel() * full.itemsize for full in live)

    # -- weights come and go ------------------------------------------------------------------

    def wait(self) -> None:
        """Wait for what `start_unshard` began."""
        for group in self.groups:
            group.weights.wait()

    def follow_main_weights(self) -> None:
        """What was written to main parameters since the last look is gathered next."""
        for group in self.groups:
            group.follow_main_weights()

    def start_unshard(self) -> None:
        """Begin the gathers of all groups."""
        tell = self._before_gather
        for group in self.groups:
            if group.weights.state in LIVE:
                continue
            # Ranks compare before they send: a gather that only some of them begin would hang.
            if tell is not None:
                tell(self)
                tell = None
            group.weights.start()

    def finish_unshard(self) -> None:
        """Wait for what `start_unshard` began, and make the modules compute with it."""
        # Group by group: the second one's gather goes on while the first one's is installed.
        for group in self.groups:
            if group.weights.state in COMING:
                group.weights.wait()
            group.install_compute_parameters()

    def unshard(self) -> None:
        """Make the whole weights ready and the modules compute with them."""
        # What was written to main weights goes into this rank's part before the part is sent.
        self.follow_main_weights()
        self.start_unshard()
        self.finish_unshard()

    def reshard(self, *, even_if_kept: bool = False) -> None:
        """Give the whole weights back; with `even_if_kept` those that stay for a step, too."""
        if (self.stays_whole or self.calls.come_back_unannounced) and not even_if_kept:
            return
        undressed = self.dress is None
        # What modules have written to compute parameters is read before the memory goes.
        for group in self.groups:
            if group.weights.state in IN_USE:
                if not undressed and self.dress is not None:
                    self.dress.hide()  # once for all groups: a forward that raised left them so
                    undressed = True
                group.install_main_parameters()
        for weights in self.gathered:
            weights.release()

    def enter_backward(self) -> bool:
        """A gradient has reached an output: whether the unit's backward begins with it."""
        # Every output announces its gradient, and a unit that was called twice comes here twice.
        begins, self.in_backward = not self.in_backward, True
        if begins and profiling():
            self._backward.begin("backward of", self.name)
        return begins

    def leave_backward(self, *, release: bool = True) -> None:
        """The unit's gradients are complete, or the backward is over: give the weights back."""
        if self._backward.open is not None:
            self._backward.end()
        # Whoever makes room for another unit may take this one's weights from now on.
        self.in_backward = False
        if release:
            self.reshard()

    # -- choices of users ---------------------------------------------------------------------

    def keep_for_step(self, keep: bool) -> None:
        """Whether, once gathered, the unit stays whole until the end of a step."""
        self.stays_whole = keep
        for weights in self.gathered:
            weights.keep_for_step(keep)

    def tell_before_gathers(self, hear: Callable[[Unit], None]) -> None:
        """Call `hear(unit)` when a gather is about to begin."""
        self._before_gather = hear

    def choose_like(self, other: Unit, same: Mapping[Unit, Unit]) -> None:
        """Take over what users have chosen for another model's unit; `same` gives ours for its."""
        self.reshard_after_forward = other.reshard_after_forward
        self.unshard_in_backward = other.unshard_in_backward
        self.prefetch = {k: tuple(map(same.__getitem__, v)) for k, v in other.prefetch.items()}

    def set_prefetch(self, step: int, units: Sequence[Unit]) -> None:
        """Gather these units when this one's forward (1) or backward (-1) begins."""
        self.prefetch[step] = tuple(units)

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Whether whole weights are given back between forward and backward, the root's too."""
        self.reshard_after_forward = reshard

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide summed gradients by this instead of the number of data-parallel ranks.

        ValueError: it is not positive. RuntimeError: gradients are being accumulated.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor({factor!r}): a number above 0")
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.set_sum(group.settings.reduction.make, 1.0 / factor)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether weights are gathered for backward; UnavailableError: it may read them."""
        for ref in () if unshard_in_backward else (r for g in self.groups for r in g.refs):
            owners = [owner() for owner, _ in ref.owners]
            if not all(isinstance(owner, (nn.Embedding, nn.EmbeddingBag)) for owner in owners):
                raise UnavailableError(
                    f"set_unshard_in_backward(False) on {self.name or self.module_class}: "
                    f"{ref.name} is no embedding's, so its backward may read weights, which are "
                    "released: shard embeddings on their own, or keep weights with "
                    "set_reshard_after_forward(False)"
                )
        self.unshard_in_backward = unshard_in_backward

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Call `hook(gradients)` when a step's last reduction is done, before anybody reads them.

        It changes main grads in place (flat, this rank's part of one group), and may communicate:
        all ranks come to it in the same order, wherever the unit had gradients. None for none.
        """
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.on_final(hook)
