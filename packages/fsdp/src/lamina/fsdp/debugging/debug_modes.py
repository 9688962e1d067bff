"""Two checks that a debugging run may pay for.

`check_order=True`: a unit or a forward of some ranks only is named, where it would hang others.
Under strategy 3 a unit's gather needs all ranks, so it runs on all of them or on none. Replicas
(HSDP, HFSDP) gather apart and reduce together, in the order in which each ran. Where collectives of
different units pair by chance, the end of the step refuses it, with or without this check. It finds
the rest, and all of it earlier. Before every gather, and at the end of every forward
and backward, ranks tell each other where they are: a small collective per axis and a
synchronisation each time, on communicators of their own.

`check_storage=True`: whoever reads a unit's released weights is named, where it would crash. A
Python reference to a parameter outlives the gather that the parameter was a view of. Without this
check a read of it finds memory that was given back: the process dies, or computes with another
unit's weights. With it, released storage is kept and filled with NaN, every operator of a forward
is asked what it reads, and what autograd saved of a unit is compared with what lies there when
backward comes for it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lamina.buffers import StaleStorageError, StoragePool
from lamina.buffers.engine import SavedTensorGuard
from lamina.collectives.engine import start_all_gather
from lamina.ddp.engine import DataParallelAxes, Unit
from lamina.fsdp.compat import TorchDispatchMode, tree_leaves

_REMEDY = (
    "Under zero_dp_strategy=3 a unit runs on all ranks or on none: call it everywhere (on a dummy "
    "batch, times zero), or use zero_dp_strategy=2, which keeps weights whole"
)


_PHASES = ("a forward without gradients", "a forward with gradients", "a backward")
_BACKWARD = 2


class RankOrderError(RuntimeError):
    """Ranks run different units, or some train while others evaluate."""


class OrderCheck:
    """Compares over ranks, along the sharding axis and that of replicas, which unit comes next.

    The messages lie on `device`.
    """

    def __init__(self, axes: DataParallelAxes, units: Sequence[Unit], device: torch.device) -> None:
        compared = [axis for axis in (axes.inner, axes.outer) if axis.size > 1]
        self._name = " and ".join(repr(axis.name) for axis in compared)
        self._me = axes.inner.ranks[axes.inner.rank]
        self._axes = compared
        for axis in compared:
            axis.sibling("check")  # makes a group, which waits for all of its ranks
        self._names = [unit.title for unit in units]
        self._indices = {id(unit): index for index, unit in enumerate(units)}
        self._device = device
        self._stops = ["the end of a forward", "the end of a backward"]

    def gather(self, unit: Unit, ran: Sequence[Unit], *, backward: bool) -> None:
        """A unit is about to be gathered, after these have begun to run.

        RankOrderError: another rank gathers another, or has come to an end, or is in a forward with
        gradients where this one's has none.
        """
        self._meet(self._indices[id(unit)], ran, _BACKWARD if backward else _forward())

    def end(self, ran: Sequence[Unit], *, backward: bool) -> None:
        """A forward or backward of these units has ended; RankOrderError: not on every rank."""
        self._meet(len(self._names) + backward, ran, _BACKWARD if backward else _forward())

    def _meet(self, place: int, ran: Sequence[Unit], phase: int) -> None:
        flags = [0] * len(self._names)
        for unit in ran:
            flags[self._indices[id(unit)]] = 1
        messages = self._everybodys([self._me, place, phase, *flags])
        # From the plainest difference to the finest: another phase, a unit that some have run, and
        # only then another place, which is mostly a consequence of one of these.
        numbers = sorted({message[2] for message in messages})
        phases = {number: _ranks(messages, 2, number) for number in numbers}
        if len(phases) > 1:
            each = ", ".join(f"ranks {on} in {_PHASES[number]}" for number, on in phases.items())
            raise RankOrderError(
                f"ranks of {self._name} differ: {each}. One of these forwards or backwards does "
                "not run on all ranks (an evaluation inside `if rank == 0`?): look at the line of "
                "your program in the traceback of each of these ranks"
            )
        where = [*self._names, *self._stops]
        at = "; ".join(
            f"at {where[stop]} on ranks {_ranks(messages, 1, stop)}"
            for stop in dict.fromkeys(message[1] for message in messages)
        )
        for index, name in enumerate(self._names, start=3):
            on, off = _ranks(messages, index, 1), _ranks(messages, index, 0)
            if on and off:
                ran_on = f"{name} has run on ranks {on} of {self._name} and not on {off}"
                raise RankOrderError(f"{ran_on} ({at}). {_REMEDY}")
        if len({message[1] for message in messages}) > 1:
            raise RankOrderError(f"ranks of {self._name} differ: {at}. {_REMEDY}")

    def _everybodys(self, mine: list[int]) -> list[list[int]]:
        """The messages of all ranks, in their order: gathered along one axis after the other."""
        flat = torch.tensor(mine, device=self._device)
        for axis in self._axes:
            flat = start_all_gather(flat, axis.sibling("check"), async_op=False).wait()
        messages: list[list[int]] = flat.view(-1, len(mine)).tolist()
        return sorted(messages)


def _forward() -> int:
    """Return the phase of a forward that runs now.

    Note [A lone forward]
    The gathers of a forward that one rank runs alone, such as an evaluation
    inside `if rank == 0`, pair with those of the next forward of the others. Both run through, and
    the job stops later, at a line that is innocent. So ranks compare phases and not only units.
    """
    return int(torch.is_grad_enabled())


def _ranks(messages: Sequence[Sequence[int]], index: int, value: int) -> list[int]:
    return [message[0] for message in messages if message[index] == value]


class StorageCheck:
    """Watches over reads of weights in a pool that is NaN wherever no unit lives (`poison`)."""

    def __init__(self, pool: StoragePool) -> None:
        self._pool = pool

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Entered around a forward.

        StaleStorageError names the unit whose released weights are read, in the forward or by the
        backward of what it computed.
        """
        with SavedTensorGuard(self._pool), _Reads(self._pool):
            yield


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks of each operator whether it reads storage that no unit lives in."""

    def __init__(self, pool: StoragePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        views = not schema.is_mutable and any(output.alias_info for output in schema.returns)
        for leaf in () if views else tree_leaves((args, kwargs)):
            # The pool itself fills released storage, as bytes, which no weights are.
            plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
            if plain and leaf.dtype is not torch.uint8:
                try:
                    self._pool.owner_of(leaf)
                except StaleStorageError as error:
                    raise StaleStorageError(f"{func} reads released weights: {error}") from error
        return func(*args, **(kwargs or {}))
