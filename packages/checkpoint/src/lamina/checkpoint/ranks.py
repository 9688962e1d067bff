"""The ranks that save and restore together, and how they agree on failures, steps and names."""

import json
import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lamina.checkpoint.errors import CheckpointDamagedError, CheckpointError
from lamina.collectives.engine import CommonFacts, all_reduce_small, broadcast, describe, software
from lamina.mesh.engine import MeshAxis, group_ref, live_group

T = TypeVar("T")
_FINE, _FAILED, _DAMAGED = 0, 1, 2


class Ranks:
    """The ranks that save and restore together: a group, or all, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        started = dist.is_available() and dist.is_initialized()
        group = (group or dist.group.WORLD) if started else None
        self._ref = group_ref(group)
        self.size = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        self.is_first = self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group, or None for this process alone; RuntimeError if it is destroyed."""
        return live_group(self._ref)

    def second_group(self) -> dist.ProcessGroup | None:
        """Make another group over the same ranks, for use by another thread (collective)."""
        if self.group is None:
            return None
        # Its own for every manager: two threads must not talk through one group.
        number = self.first(secrets.randbits(62))
        ranks = tuple(dist.get_process_group_ranks(self.group))
        axis = MeshAxis("checkpoint", self.size, self.rank, ranks, self._ref)
        return axis.sibling(f"writer-{number:x}")

    def first(self, value: int) -> int:
        """Return the first rank's number on every rank."""
        shared = torch.tensor([value], dtype=torch.int64, device="cpu")
        broadcast(shared, self.group, src=0).wait()
        return int(shared)

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Return, for each flag, whether it is set on any rank."""
        if not flags:
            return []
        shared = torch.tensor(list(flags), dtype=torch.uint8, device="cpu")
        all_reduce_small([shared], self.group, op="max")
        return [bool(flag) for flag in shared.tolist()]

    def agree(self, text: bytes) -> bool:
        """Whether every rank has the same text, by its CRC-32 (collective)."""
        sums = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        sums[self.rank] = zlib.crc32(text)
        all_reduce_small([sums], self.group, op="max")
        return bool((sums == sums[0]).all())

    def require_same(self, what: str, **facts: object) -> None:
        """Compare arguments over ranks; DisagreementError on all if they differ (collective)."""
        common = CommonFacts(what, [self.group])
        common.require([*software(), *((name, describe(value)) for name, value in facts.items())])

    def lists(self, names: Sequence[str]) -> list[list[str]]:
        """Return the names of each rank, by rank (collective)."""
        text = json.dumps(list(names)).encode()
        lengths = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        lengths[self.rank] = len(text)
        all_reduce_small([lengths], self.group, op="max")
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8, device="cpu")
        table[self.rank, : len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
        all_reduce_small([table], self.group, op="max")
        rows = zip(table.tolist(), lengths.tolist(), strict=True)
        return [json.loads(bytes(row[:length])) for row, length in rows]

    def together(self, work: Callable[[], T]) -> T:
        """Run `work`; if it fails on any rank, raise on every rank instead of letting some wait."""
        failure: BaseException | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        states = torch.zeros(self.size, dtype=torch.uint8, device="cpu")
        if failure is not None:
            damaged = isinstance(failure, CheckpointDamagedError)
            states[self.rank] = _DAMAGED if damaged else _FAILED
        all_reduce_small([states], self.group, op="max")
        if failure is not None:
            raise failure
        if states.any():
            # All ranks raise the same class, so that all of them take the same way out.
            kind = CheckpointDamagedError if int(states.max()) == _DAMAGED else CheckpointError
            raise kind(
                f"rank {int(states.nonzero()[0])} of the group failed; its own error says why"
            )
        return cast(T, result)


def own_error(doing: str, error: BaseException) -> BaseException:
    """Turn DCP's collected failures into this layer's errors; others pass as they are."""
    if not isinstance(error, CheckpointException):
        return error
    rank, (first, trace) = min(error.failures.items())
    ranks = ", ".join(map(str, sorted(error.failures)))
    if isinstance(first, (CheckpointError, FileExistsError)):
        return type(first)(f"{doing} failed on rank {ranks}: {first}")
    where = "".join(trace.format()[-1:]).strip() if trace else "unknown place"
    return CheckpointError(
        f"{doing} failed on rank {ranks}; rank {rank}: {type(first).__name__}: {first} ({where})"
    )
