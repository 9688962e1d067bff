"""The engine of one sharded model: when units are gathered, released and reduced.

A forward walks units in some order; the engine records it and gathers the next unit while one
computes. A backward walks it the other way. What starts a backward is the first gradient that
reaches any unit's output, what ends it is autograd's own callback, and both are told apart from
recomputation, which runs forwards inside a backward.
"""

import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.buffers import StaleStorageError, StoragePool
from lamina.collectives.engine import current_stream
from lamina.ddp.engine import (
    GradientReducer,
    ModuleBuffers,
    ModuleWatch,
    ParameterGroup,
    await_backward,
)
from lamina.fsdp.compat import current_graph_task_id, graph_is_kept
from lamina.fsdp.execution.debug_order import OrderCheck
from lamina.fsdp.execution.debug_storage import StorageCheck
from lamina.fsdp.execution.unit import PendingBackward, Unit, UnitState
from lamina.fsdp.settings.hardware_limits import SlotMemory, UnavailableError

__all__ = ["ShardingEngine"]


class GatherBudget:
    """How many bytes of whole weights a rank may have at once, and who makes room for whom.

    A unit is gathered ahead only where it fits. One that is about to compute is always gathered:
    units that are not computing (gathered ahead, or kept since their forward) go first. Units that
    stay whole for a step because somebody asked for it are not counted.
    """

    def __init__(self, units: Iterable[Unit], limit: int) -> None:
        self.limit = limit
        self._units = tuple(units)

    @property
    def live(self) -> int:
        """Bytes of whole weights that are there or on their way."""
        return sum(unit.live_bytes for unit in self._units if not unit.stays_whole)

    def fits(self, unit: Unit) -> bool:
        """Whether a unit can be gathered beside what is live."""
        return self.live + unit.gathered_bytes - unit.live_bytes <= self.limit

    def make_room(self, unit: Unit, order: Sequence[Unit], computing: Sequence[Unit]) -> None:
        """Give back what need not be there for a unit that is about to compute.

        Units run in this order: those whose turn is farthest off go first, and none in whose
        forward we are (`computing`).
        """
        if self.fits(unit):
            return
        turn = {id(one): index for index, one in enumerate(order)}
        here = turn.get(id(unit), 0)
        idle = [
            other
            for other in self._units
            if other.live_bytes
            and other is not unit
            and other.state is not UnitState.IN_BACKWARD
            and not any(other is one for one in computing)
        ]
        idle.sort(key=lambda other: abs(turn.get(id(other), len(order)) - here), reverse=True)
        for other in idle:
            if self.fits(unit):
                return
            other.reshard()


class ShardingEngine:
    """Gathers, releases and reduces the units of one model.

    Args:
        units: the root first, then in order of registration.
        reducer: sums gradients over ranks.
        pool: storage of whole weights, if its places are to be planned as slots once the first
            step has shown which units live together.
        overlap_gather: start the next unit's gather before the current unit computes.
        fixed_addresses: once places are planned no unit ever moves: CUDA graphs hold addresses.
        gather_budget: gather as many units ahead as fit into so many bytes of whole weights; None
            is the next one.
        order_check: compares over ranks which units run.
        slot_memory: registered memory that the slots lie in, to be let go of before the process
            group is.
        storage_check: watches over reads of released weights.
        watch: looks for parameters that modules hold since, before each forward of training.
        module_buffers: brings buffers together before forwards.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        reducer: GradientReducer,
        *,
        pool: StoragePool | None = None,
        overlap_gather: bool = True,
        fixed_addresses: bool = False,
        gather_budget: int | None = None,
        order_check: OrderCheck | None = None,
        slot_memory: SlotMemory | None = None,
        storage_check: StorageCheck | None = None,
        watch: ModuleWatch | None = None,
        module_buffers: ModuleBuffers | None = None,
    ) -> None:
        self.units = tuple(units)
        self.root = self.units[0]
        self.reducer = reducer
        reducer.tell(self)
        self.gather_budget = None
        if gather_budget is not None:
            self.gather_budget = GatherBudget(self.units, gather_budget)
        self.slot_memory = slot_memory
        self._storage_check = storage_check
        self._watch = watch
        self._module_buffers = module_buffers
        self._order_check = order_check
        if order_check is not None:
            engine = weakref.ref(self)  # the engine holds its units, and not the other way round
            for unit in self.units:
                unit.tell_before_gathers(functools.partial(_before_gather, engine))
        self._told: set[int] = set()
        """`id`s of main parameters that belong to an optimizer which tells when it wrote them."""
        self._untold = list(self.groups)
        """Groups whose main weights somebody may write without telling."""
        self._overlap_gather = overlap_gather
        self._pool = pool
        self._planned = False
        self._fixed_addresses = fixed_addresses
        self._order: list[Unit] = []
        self._recording: list[Unit] = []
        self._computing: list[Unit] = []
        devices = (group.device for unit in self.units for group in unit.groups)
        self._device = next(devices, torch.device("cpu"))
        self._stream: torch.cuda.Stream | None = None  # of the root's forward
        self._ran_backward: list[Unit] = []
        self._recomputed: Unit | None = None
        self._all_whole = False
        self._graph_kept = False  # by the newest backward: another may come to the same storage
        self._graph_waits = False  # for its backward
        self._kept_graphs = weakref.WeakSet[PendingBackward]()  # by any backward so far

    @property
    def groups(self) -> Iterator[ParameterGroup]:
        """All groups of all units, frozen ones included."""
        for unit in self.units:
            yield from unit.groups

    def gathered_again(self) -> list[ParameterGroup]:
        """Groups that are released after their forward, so that a backward gathers them again."""
        last = self._order[-1] if self._order else self.units[-1]
        kept = {self.root: self.root.reshard_after_forward is not True, last: True}
        again = (
            unit
            for unit in self.units
            if unit.unshard_in_backward
            and not unit.stays_whole
            and not kept.get(unit, unit.reshard_after_forward is False)
        )
        return [group for unit in again for group in unit.groups]

    def watching(self) -> AbstractContextManager[None]:
        """Entered around a forward of the model: with `check_storage`, reads are watched over."""
        return nullcontext() if self._storage_check is None else self._storage_check.watching()

    def look(self, root: nn.Module) -> None:
        """Before a forward of the outermost module: its buffers, and parameters new since.

        RuntimeError: it holds parameters that it did not hold when it was sharded.
        """
        if self.reducer.in_backward:
            return
        if self._watch is not None and torch.is_grad_enabled():
            self._watch.look(root, optimizer_known=bool(self._told))
        if self._module_buffers is not None:
            self._module_buffers.before_forward(root)

    @property
    def computes(self) -> bool:
        """Whether a forward of the root, or a backward, is going on: units are called by it."""
        return self.reducer.in_backward or self.root in self._computing

    # -- forward ------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """A unit's module is about to run."""
        self.reducer.abandon_if_raised()
        self._computing.append(unit)
        if self.reducer.in_backward:  # recomputation
            self._start(unit)
            unit.finish_unshard()
            unit.forward.begin("forward again of", unit.name)
            return
        if unit is self.root:
            self._begin_forward()
        elif self._stream is not None and self._leaves_stream():
            raise RuntimeError(
                f"unit {unit.name} runs on another CUDA stream than the forward it is part of, and "
                "its weights are gathered and released for that one alone: run all units on one "
                "stream, or leave this module out of fsdp_unit_modules"
            )
        training = torch.is_grad_enabled()
        unit.calls.begin(training=training)
        first = unit not in self._recording
        if first:
            self._recording.append(unit)
        if unit is not self.root:  # a module around it may have written since the forward began
            unit.follow_main_weights()
        self._start(unit)
        if first or unit.calls.members == 1:
            self._prefetch(unit, step=1)
        unit.finish_unshard()
        if training:
            unit.save_epochs()
        unit.forward.begin("forward of", unit.name)

    def _leaves_stream(self) -> bool:
        """Whether a unit runs on another stream than the root's forward, of which it is a part."""
        return self.root in self._computing and current_stream(self._device) != self._stream

    def _begin_forward(self) -> None:
        self._recording = []
        self._computing = [self.root]
        if self._graph_waits:
            self._graph_waits = await_backward(self.reducer.groups, False)
        self._stream = current_stream(self._device)
        for group in self.reducer.groups:
            group.begin_forward()
        for unit in self.units:
            unit.calls.new_forward()

    def after_forward(self, unit: Unit, member: int = 0) -> None:
        """A unit's module has run: release it, unless backward or others of its own need it."""
        unit.forward.end()
        if unit in self._computing:
            self._computing.remove(unit)
        if self.reducer.in_backward:
            self._after_recomputation(unit)
            return
        training, complete = torch.is_grad_enabled(), unit.calls.end(member)
        if unit is self.root:
            self._end_forward(training)
            if unit.reshard_after_forward:
                unit.reshard()
            return
        last = bool(self._order) and unit is self._order[-1]
        keep = training and (last or unit.reshard_after_forward is False)
        if complete and not keep:
            unit.reshard()

    def _end_forward(self, training: bool) -> None:
        self._order = self._recording
        if self._order_check is not None:
            self._order_check.end(self._order, backward=False)
        called = set(self._order)
        for unit in self.units:
            if not training or unit not in called:  # some are gathered ahead and then not called
                unit.reshard()
        if training:
            self._graph_waits = await_backward(self.reducer.groups, True)

    def _after_recomputation(self, unit: Unit) -> None:
        if unit.state is UnitState.IN_BACKWARD:
            return
        # Keep only the newest: with reentrant checkpointing its backward comes next; when a
        # segment of several units is recomputed, the others are gathered again in their turn.
        before, self._recomputed = self._recomputed, unit
        if before is None or before is unit or before.state is UnitState.IN_BACKWARD:
            return
        before.reshard()

    def _prefetch(self, unit: Unit, step: int) -> None:
        """Start the gather of the units that came after (or before) this one last time."""
        ahead: Sequence[Unit] = ()
        budget = self.gather_budget
        if step in unit.prefetch:
            ahead = unit.prefetch[step]
        elif self._overlap_gather and unit in self._order:
            index = self._order.index(unit)
            ahead = self._order[index + 1 :] if step > 0 else self._order[:index][::-1]
            ahead = ahead[:1] if budget is None else ahead
        for other in ahead:
            if step < 0 and not other.unshard_in_backward:
                continue
            if budget is not None and not budget.fits(other):
                return
            # Its slot may be taken for now: it is gathered when its turn comes.
            with suppress(StaleStorageError):
                other.start_unshard()

    def compare_order(self, unit: Unit) -> None:
        """Before a gather, with `check_order`: whether all ranks gather this unit now."""
        if self._order_check is not None:
            backward = self.reducer.in_backward
            ran = self._ran_backward if backward else self._recording
            self._order_check.gather(unit, ran, backward=backward)

    def _start(self, unit: Unit) -> None:
        """Begin a unit's gathers; whoever sits in its slot without need makes room."""
        if self.gather_budget is not None:
            self.gather_budget.make_room(unit, self._order, self._computing)
        try:
            unit.start_unshard()
        except StaleStorageError:
            for other in self.units:
                needed = other is unit or other is self.root
                if not needed and other.state is not UnitState.IN_BACKWARD:
                    other.reshard()
            try:
                unit.start_unshard()
            except StaleStorageError as error:
                raise StaleStorageError(
                    f"{unit.title} shares its slot with a unit that computes at the same time, "
                    "which it did not do in the first step: with units whose order changes that "
                    "much use fsdp_double_buffer=False"
                ) from error

    # -- backward -----------------------------------------------------------------------------

    def expect_backward(self, unit: Unit, member: int) -> None:
        """Gradients may come to outputs of a unit's module (not if it only runs again)."""
        if not self.reducer.in_backward:
            unit.calls.expect_member(member)

    def before_backward(self, unit: Unit, epochs: tuple[int, ...], member: int = 0) -> None:
        """The first gradient has reached one of the outputs of a unit's module.

        StaleStorageError: slots have moved the unit since that forward, whose `epochs` are those of
        its weights' storage.
        """
        self.reducer.begin_backward()
        unit.return_to(epochs)
        unit.calls.member_came_back(member)
        if unit.begin_backward():
            self._ran_backward.append(unit)
        if unit.unshard_in_backward:
            self._start(unit)
        self._prefetch(unit, step=-1)
        if unit.unshard_in_backward:
            unit.finish_unshard()

    def after_backward(self, unit: Unit, pending: PendingBackward) -> None:
        """Gradients of the unit's inputs are there, so those of its parameters are complete."""
        unit.calls.came_back(pending)
        if self._graph_kept:
            self._kept_graphs.add(pending)
        elif self._kept_graphs:
            self._kept_graphs.discard(pending)
        if not self.reducer.in_backward or unit.calls.expects_more:
            return  # another forward of this unit is still to come back; or the end closes it
        if unit is not self.root:
            unit.end_backward()  # before the reduction takes memory
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
        if self._graph_waits:
            self._graph_waits = await_backward(self.reducer.groups, False)
        self._graph_kept = graph_is_kept()
        self._ran_backward = []
        self._recomputed = None

    def backward_ends(self) -> None:
        """Autograd is done (called by the reducer): groups that no unit closed are complete."""
        if self._order_check is not None:
            self._order_check.end(self._ran_backward, backward=True)
        for unit in self._ran_backward:
            self._close(unit)

    def backward_is_over(self, *, raised: bool) -> None:
        """Gradients are reduced, or the backward has raised (called by the reducer)."""
        # One that raised is often noticed by the next, whose graph may read what is still whole.
        self._leave_backward(release=current_graph_task_id() == -1 or not raised)
        if not raised:
            self._plan_slots()
            if self.reducer.is_final:
                self.expect_step()

    def _leave_backward(self, *, release: bool) -> None:
        self._ran_backward = []
        self._recomputed = None
        waits = bool(self._kept_graphs)
        for unit in self.units:
            unit.calls.end_backward()
            unit.end_backward(release=release)
            if self._graph_kept or unit.calls.expects_more:
                waits = True
            else:
                unit.forget_epochs()
        if waits:
            self._graph_waits = await_backward(self.reducer.groups, True)

    def _plan_slots(self) -> None:
        """Let units that never live together share slots, once a whole step was observed."""
        if self._pool is None or self._planned or self._graph_kept or not self._order:
            return
        if any(unit.calls.expects_more for unit in self.units):
            return
        self._planned = True
        self._pool.plan_slots(dedicated=True)
        self._follow_storage()

    def _follow_storage(self) -> None:
        """The pool may have moved weights: make parameters views of where they are."""
        for unit in self.units:
            for weights in unit.gathered:
                weights.follow(fixed=self._planned and self._fixed_addresses)

    # -- between steps ------------------------------------------------------------------------

    def mark_weights_changed(self) -> None:
        """Main weights were written: every unit installs them before it computes again."""
        for group in self.groups:
            group.weights.mark_changed()

    def follow(self, optimizer: Optimizer) -> None:
        """An optimizer will tell when it wrote the main weights it holds now."""
        self._told.update(id(p) for settings in optimizer.param_groups for p in settings["params"])
        self._untold = [
            group
            for group in self.groups
            if group.requires_grad and any(id(p) not in self._told for p in group.main_parameters)
        ]

    def expect_step(self) -> None:
        """Gradients are final: an optimizer that nobody was told of may write main weights."""
        for group in self._untold:
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
        self.reducer.abandon_if_raised()
        if self.reducer.in_backward:
            raise RuntimeError(
                "state_dict() or load_state_dict() while a backward runs (in this or another "
                "thread), which computes with the whole weights: call it between two steps"
            )
        for one in units:
            one.reshard(even_if_kept=True)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """All units whole for the time being (collective)."""
        with ExitStack() as stack:
            stack.callback(setattr, self, "_all_whole", self._all_whole)
            self._all_whole = True
            if self._pool is not None:  # as no step needs them: slots are not planned for this
                stack.callback(self._follow_storage)  # last of all: some go back to their slots
                stack.enter_context(self._pool.out_of_turn())
            for group in self.reducer.groups:
                group.begin_forward()
            for unit in self.units:
                stack.callback(unit.reshard)
                for weights in unit.gathered:
                    stack.enter_context(weights.moving())
                unit.unshard()
            yield


def _before_gather(reference: weakref.ref[ShardingEngine], unit: Unit) -> None:
    if (engine := reference()) is not None:
        engine.compare_order(unit)
