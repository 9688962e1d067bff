"""A unit at work: its groups' weights come and go together.

A unit is in one state of `UnitState` at a time. Only its own methods change the state, by the
table `TRANSITIONS`; the engine, the hooks and the budgets call these methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from operator import attrgetter

import torch
from torch import nn

from lamina.buffers import StaleStorageError
from lamina.collectives.engine import Span
from lamina.ddp.engine import ParameterGroup, WeightsState
from lamina.fsdp.settings.hardware_limits import UnavailableError
from lamina.fsdp.units.dtensors import hide_dtensors, localised_among
from lamina.fsdp.weights.sharded import ShardedWeights

__all__ = ["TRANSITIONS", "PendingBackward", "Unit", "UnitCalls", "UnitEvent", "UnitState"]


class UnitState(Enum):
    """What a unit's modules hold, and who needs it."""

    AT_REST = auto()
    """Modules hold what the optimizer updates; gathered weights are released."""
    GATHERING = auto()
    """Gathers have begun, and nobody has waited for them yet."""
    WHOLE = auto()
    """Modules hold the compute parameters."""
    IN_BACKWARD = auto()
    """Gradients are coming. The engine takes nothing away before the last one has come."""


class UnitEvent(Enum):
    """What happens to a unit."""

    START = auto()
    """Its gathers begin."""
    USE = auto()
    """Its modules are about to compute, forward or backward."""
    RELEASE = auto()
    """Whole weights are given back."""
    BACKWARD = auto()
    """The first gradient has reached one of its outputs."""
    BACKWARD_END = auto()
    """Its last gradient has come, or the backward is over."""


_REST, _GATHERING, _WHOLE, _BACKWARD = UnitState
TRANSITIONS: dict[UnitEvent, dict[UnitState, UnitState]] = {
    UnitEvent.START: {_REST: _GATHERING, _WHOLE: _GATHERING},
    UnitEvent.USE: {_GATHERING: _WHOLE},
    UnitEvent.RELEASE: {_GATHERING: _REST, _WHOLE: _REST},
    UnitEvent.BACKWARD: {_REST: _BACKWARD, _GATHERING: _BACKWARD, _WHOLE: _BACKWARD},
    UnitEvent.BACKWARD_END: {_BACKWARD: _WHOLE},
}
"""The state after an event, by the state before. A state that is not listed stays."""

_START, _USE, _RELEASE, _BEGIN_BACKWARD, _END_BACKWARD = TRANSITIONS.values()
_EPOCH = attrgetter("epoch")


class PendingBackward:
    """One forward of a unit whose backward is still to come.

    It lives on the autograd graph and nowhere else: when the graph is freed without a backward
    (a discarded loss, a recomputation), it is gone, and nobody waits for it.
    """

    __slots__ = ("__weakref__",)


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
        """Runs in the newest forward of the model with gradients off: reentrant recomputation will
        come back to each of them, one at a time and without notice."""
        self._pending: set[weakref.ref[PendingBackward]] = set()

    def new_forward(self) -> None:
        """A forward of the whole model begins."""
        self._without_grad = 0
        self._ran.clear()

    def begin(self, *, training: bool) -> None:
        """One of the unit's modules is about to run."""
        if not training:
            self._without_grad += 1

    def end(self, member: int) -> bool:
        """One of them has run: whether all of them have, since this was so last."""
        if self.members == 1:
            return True
        self._ran.add(member)
        complete = len(self._ran) == self.members
        if complete:
            self._ran.clear()
        return complete

    def expect(self) -> PendingBackward:
        """Note a forward that autograd will come back to; the caller puts it on the graph."""
        pending = PendingBackward()
        self._pending.add(weakref.ref(pending, self._pending.discard))
        return pending

    def came_back(self, pending: PendingBackward) -> None:
        """Autograd has come back to a forward."""
        self._pending.discard(weakref.ref(pending))

    def expect_member(self, member: int) -> None:
        """Gradients may come to outputs of one of several modules."""
        if self.members > 1:
            self._coming.add(member)

    def member_came_back(self, member: int) -> None:
        """They have come."""
        self._coming.discard(member)

    def end_backward(self) -> None:
        """What has not come by now does not come in this backward."""
        self._coming.clear()

    @property
    def expects_more(self) -> bool:
        """Whether some forward's backward has not run yet, or may be yet to come."""
        return self._without_grad > 1 or bool(self._pending or self._coming)


class Unit:
    """Modules' parameters that are gathered and released together.

    `name` is that of the unit's `module` in the model, "" for the root. The module is held weakly,
    because it holds its engine through its hooks; its modules hold the compute parameters of
    `groups`. So many `members` that are called are one unit.
    """

    def __init__(
        self, name: str, module: nn.Module, groups: Sequence[ParameterGroup], members: int = 1
    ) -> None:
        self.name = name
        self.module_class = type(module).__name__
        self.groups = tuple(groups)
        self.gathered: tuple[ShardedWeights, ...] = tuple(
            group.weights for group in groups if isinstance(group.weights, ShardedWeights)
        )
        """Those of the groups' weights that come and go."""
        self.gathered_bytes = sum(weights.nbytes for weights in self.gathered)
        """Bytes of their whole weights."""
        self.localised = localised_among(ref for group in groups for ref in group.refs)
        """Parameters that modules see as DTensors in their forward."""
        self.calls = UnitCalls(members)
        self.state = UnitState.WHOLE
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
            path = paths.get(0, "")
            if len(paths) > 1:
                number, name = name.split(".", 1)
                path = paths[int(number)]
            return f"{path}.{name}" if path else name

        for group in self.groups:
            group.rename([whole(ref.name) for ref in group.refs])

    @property
    def live_bytes(self) -> int:
        """Bytes of gathered weights that are there, or on their way."""
        there = (w for w in self.gathered if w.state is not WeightsState.RELEASED)
        return sum(weights.nbytes for weights in there)

    # -- weights come and go ------------------------------------------------------------------

    def follow_main_weights(self) -> None:
        """What was written to main parameters since the last look is gathered next."""
        for group in self.groups:
            group.follow_main_weights()

    def start_unshard(self) -> None:
        """Begin the gathers of all groups."""
        self.state = _START.get(self.state, self.state)
        if self._before_gather is not None and self.live_bytes < self.gathered_bytes:
            self._before_gather(self)
        for group in self.groups:
            if group.weights.state is WeightsState.RELEASED:
                group.weights.start()

    def finish_unshard(self) -> None:
        """Wait for what `start_unshard` began, and make the modules compute with it."""
        for group in self.groups:
            if group.weights.state is WeightsState.GATHERING:
                group.weights.wait()
            group.install_compute_parameters()
        self.state = _USE.get(self.state, self.state)

    def unshard(self) -> None:
        """Make the whole weights ready and the modules compute with them."""
        self.follow_main_weights()
        self.start_unshard()
        self.finish_unshard()

    def reshard(self, *, even_if_kept: bool = False) -> None:
        """Give the whole weights back; with `even_if_kept` those that stay for a step, too."""
        if self.state is UnitState.AT_REST or (self.stays_whole and not even_if_kept):
            return
        self.state = _RELEASE.get(self.state, self.state)
        if self.localised:
            hide_dtensors(self.localised)  # a forward that raised has left them there
        for group in self.groups:
            group.install_main_parameters()
        for weights in self.gathered:
            if weights.state is not WeightsState.RELEASED:
                weights.release()

    def begin_backward(self) -> bool:
        """The first gradient has reached an output: whether the unit's backward begins with it."""
        begins = self.state is not UnitState.IN_BACKWARD
        if begins:
            self._backward.begin("backward of", self.name)
        self.state = _BEGIN_BACKWARD.get(self.state, self.state)
        return begins

    def end_backward(self, *, release: bool = True) -> None:
        """The unit's gradients are complete, or the backward is over: give the weights back."""
        self._backward.end()
        self.state = _END_BACKWARD.get(self.state, self.state)
        if release:
            self.reshard()

    # -- where autograd saved views -----------------------------------------------------------

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epochs of the gathered weights' storage, in which autograd saves views of them."""
        return tuple(map(_EPOCH, self.gathered))

    def save_epochs(self) -> None:
        """Autograd saves views of the weights now: until `forget_epochs` they come back there."""
        for weights in self.gathered:
            weights.save_epoch()

    def return_to(self, epochs: Sequence[int]) -> None:
        """The backward of a forward that ran in these epochs comes now (again).

        StaleStorageError: the storage has moved since, which that graph does not know.
        """
        if self.epochs != epochs:
            raise StaleStorageError(
                f"{self.title} has moved to another storage since the forward whose backward runs "
                "again (retain_graph=True), as other backwards came between: run that forward "
                "anew, walk its graph again before other backwards, or use "
                "fsdp_double_buffer=False"
            )
        self.save_epochs()

    def forget_epochs(self) -> None:
        """No graph holds views of the weights any more."""
        for weights in self.gathered:
            weights.forget_epoch()

    # -- choices of users ---------------------------------------------------------------------

    def keep_for_step(self, keep: bool) -> None:
        """Whether, once gathered, the unit stays whole until the end of a step."""
        self.stays_whole = keep
        for weights in self.gathered:
            weights.kept_for_step = keep

    def tell_before_gathers(self, hear: Callable[[Unit], None]) -> None:
        """Call `hear(unit)` when a gather is about to begin."""
        self._before_gather = hear

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
            if not all(isinstance(one, (nn.Embedding, nn.EmbeddingBag)) for one in owners):
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
