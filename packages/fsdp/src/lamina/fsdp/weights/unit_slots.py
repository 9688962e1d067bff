"""`fsdp_double_buffer=True`: units that never live together share slots, planned after one step.

See Note [Slots] in `lamina.buffers.pool.slots` for what they are. What an engine has to do for them
is here: bring a unit back to the slot in which autograd saved views of its weights, empty a slot
that somebody sits in without need, and plan slots once a whole step was seen.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from lamina.buffers import StaleStorageError, StoragePool
from lamina.ddp.engine import Unit
from lamina.fsdp.settings.hardware_limits import SlotMemory
from lamina.fsdp.weights.sharded import ShardedWeights

__all__ = ["UnitSlots"]


class UnitSlots:
    """The slots of one model's units, in one pool.

    With `fixed_addresses` no unit ever moves once slots are planned: CUDA graphs hold addresses.
    `memory` is what the slots lie in, if it is registered.
    """

    def __init__(
        self, pool: StoragePool, *, fixed_addresses: bool = False, memory: SlotMemory | None = None
    ) -> None:
        self._pool = pool
        self._memory = memory
        self._planned = False
        self._fixed_addresses = fixed_addresses

    def start(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Begin a unit's gathers; whoever of `units` sits in its slot without need makes room.

        The root is the first of them. StaleStorageError: one that is needed sits there.
        """
        try:
            unit.start_unshard()
        except StaleStorageError:
            for other in units:
                needed = other is unit or other is units[0]
                if not needed and not other.in_backward:
                    other.reshard()
            try:
                unit.start_unshard()
            except StaleStorageError as error:
                raise StaleStorageError(
                    f"{unit.title} shares its slot with a unit that computes at the same time, "
                    "which it did not do in the first step: with units whose order changes that "
                    "much use fsdp_double_buffer=False"
                ) from error

    def close(self) -> None:
        """Let go of registered memory before the process group is destroyed."""
        if self._memory is not None:
            self._memory.close()

    # -- where autograd saved views -----------------------------------------------------------

    def epochs(self, unit: Unit) -> tuple[int, ...]:
        """The epochs of the gathered weights' storage, in which autograd saves views of them."""
        return tuple([weights.epoch for weights in _sharded(unit)])

    def save_epochs(self, unit: Unit) -> None:
        """Autograd saves views of the weights now: until `forget_epochs` they come back there."""
        for weights in _sharded(unit):
            weights.save_epoch()

    def return_to(self, unit: Unit, epochs: tuple[int, ...]) -> None:
        """The backward of a forward that ran in these epochs comes now (again).

        StaleStorageError: the storage has moved since, which that graph does not know.
        """
        if self.epochs(unit) != epochs:
            raise StaleStorageError(
                f"{unit.title} has moved to another storage since the forward whose backward runs "
                "again (retain_graph=True), as other backwards came between: run that forward "
                "anew, walk its graph again before other backwards, or use "
                "fsdp_double_buffer=False"
            )
        self.save_epochs(unit)

    def forget_epochs(self, unit: Unit) -> None:
        """No graph holds views of the weights any more."""
        for weights in _sharded(unit):
            weights.forget_epoch()

    # -- the plan -----------------------------------------------------------------------------

    def settle(self, units: Sequence[Unit]) -> None:
        """A whole step was observed: units that never live together share slots from now on."""
        if not self._planned:
            self._planned = True
            self._pool.plan_slots(dedicated=True)
            self._follow_storage(units)

    @contextmanager
    def apart(self, units: Sequence[Unit]) -> Iterator[None]:
        """All units may be whole in here, as in no step: nothing is planned for this."""
        with ExitStack() as stack:
            stack.callback(self._follow_storage, units)  # last of all: some go back to their slots
            stack.enter_context(self._pool.out_of_turn())
            for unit in units:
                for weights in _sharded(unit):
                    stack.enter_context(weights.moving())
            yield

    def _follow_storage(self, units: Sequence[Unit]) -> None:
        """The pool may have moved weights: make parameters views of where they are."""
        for unit in units:
            for weights in _sharded(unit):
                weights.follow(fixed=self._planned and self._fixed_addresses)


def _sharded(unit: Unit) -> Iterator[ShardedWeights]:
    return (weights for weights in unit.gathered if isinstance(weights, ShardedWeights))
