"""`fsdp_double_buffer=True`: units that never live together share slots, planned after one step.

Note [Slots of units]
    By default a unit's storage is its own, and is resized: its bytes come with each gather and go
    with each release, at an address that never changes. A slot is fixed memory that several units
    share. Who lives with whom is known after one whole step only, so the first step runs with
    storage of each unit's own, and is observed; then slots are planned, and parameters become views
    of them. A later step in another order finds a slot taken: whoever sits there without need makes
    room. What autograd has saved are views of one slot, so a unit comes back for its backward to
    where its forward was (its epoch). See Note [Slots] in `lamina.buffers.pool.slots` for the plan.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch.distributed import ProcessGroup

from lamina.buffers import StaleStorageError, StoragePool
from lamina.collectives import register_pool
from lamina.collectives.engine import RegisteredPool
from lamina.ddp.engine import UnavailableError, Unit, registration_refusal
from lamina.fsdp.settings.sharding_settings import ShardingSettings
from lamina.fsdp.weights.sharded import ShardedWeights


def refuse_unavailable(
    settings: ShardingSettings, groups: Sequence[ProcessGroup | None], device: torch.device
) -> None:
    """Raise UnavailableError for what slots need and this hardware, or build of torch, lacks.

    `groups` gather; None is an axis of one rank. ValueError refuses registered memory that is not
    fixed.
    """
    if settings.cuda_graph_mode and device.type != "cuda":
        raise UnavailableError(
            f"cuda_graph_mode=True: the model is on {device}, and only CUDA has graphs"
        )
    if settings.nccl_ub:
        symmetric = not settings.disable_symmetric_registration
        refusal = registration_refusal(groups, device, symmetric=symmetric)
        if refusal is not None:
            raise UnavailableError(refusal)
        if not settings.fsdp_double_buffer:
            raise ValueError(
                "nccl_ub=True registers the fixed buffers of fsdp_double_buffer=True, which is "
                "off: turn it on (memory that comes and goes cannot stay registered)"
            )


class UnitSlots:
    """The slots of one model's units, in a pool of their own.

    `groups` gather into it. With `cuda_graph_mode` no unit ever moves once slots are planned,
    because graphs hold addresses; with `nccl_ub` slots lie in memory that NCCL has registered.
    """

    def __init__(
        self,
        settings: ShardingSettings,
        groups: Sequence[ProcessGroup | None],
        device: torch.device,
    ) -> None:
        self.pool = StoragePool(
            device,
            mode="slots",
            poison=settings.check_storage,
            slot_context=self._register if settings.nccl_ub else None,
        )
        self._settings = settings
        self._groups = tuple(dict.fromkeys(group for group in groups if group is not None))
        self._planned = False
        self._registered: list[RegisteredPool] = []

    def _register(self) -> AbstractContextManager[object]:
        """Entered around the allocation of all slots: registers them at the end (collective)."""
        symmetric = not self._settings.disable_symmetric_registration
        self._registered.append(register_pool(self._groups, self.pool.device, symmetric=symmetric))
        return self._registered[-1]

    def start(self, unit: Unit, units: Sequence[Unit]) -> None:
        """Begin a unit's gathers; whoever of `units` sits in its slot without need makes room.

        The root is the first of them. StaleStorageError: one that is needed sits there.
        """
        try:
            unit.start_unshard()
        except StaleStorageError:
            # Who was kept since its forward, or gathered ahead, is gathered again in its turn. The
            # root computes around all units, and a unit in backward waits for gradients.
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
        """Let go of registered memory, on all ranks, before the process group is destroyed."""
        while self._registered:
            self._registered.pop().close()

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
            # A unit that can share with none gets a slot too: all addresses are fixed then.
            self.pool.plan_slots(dedicated=True)
            self._follow_storage(units)

    @contextmanager
    def apart(self, units: Sequence[Unit]) -> Iterator[None]:
        """All units may be whole in here, as in no step: nothing is planned for this."""
        with ExitStack() as stack:
            stack.callback(self._follow_storage, units)  # last of all: some go back to their slots
            # Two units of one slot cannot both be whole in it: one moves for the time being, also
            # where addresses are fixed otherwise.
            stack.enter_context(self.pool.out_of_turn())
            for unit in units:
                for weights in _sharded(unit):
                    stack.enter_context(weights.moving())
            yield

    def _follow_storage(self, units: Sequence[Unit]) -> None:
        """The pool may have moved weights: make parameters views of where they are."""
        for unit in units:
            for weights in _sharded(unit):
                weights.follow(fixed=self._planned and self._settings.cuda_graph_mode)


def _sharded(unit: Unit) -> Iterator[ShardedWeights]:
    return (weights for weights in unit.gathered if isinstance(weights, ShardedWeights))
