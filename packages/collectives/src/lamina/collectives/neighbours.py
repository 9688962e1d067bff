"""Ranks of one host read each other's memory, where the kernel allows it.

Over loopback a byte is copied into the kernel and out of it, by two threads that wake each other.
Linux can copy it once, from one process's memory into another's (`process_vm_readv`; MPI libraries
call it cross-memory attach). Ranks agree on it when a group is first used: each pair must run on
one boot of one machine, in one process and one network namespace (who puts ranks into different
network namespaces wants them to use the network), and each must really have read a secret out of
the other's memory. Every other pair exchanges messages, with the same results.
"""

from __future__ import annotations

import ctypes
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = ["Neighbour", "RemoteRun", "meet"]

_HELLO_TAG = (1 << 24) - 2
_VERDICT_TAG = (1 << 24) - 1
_PLACE = 3
_WORDS = _PLACE + 4  # of a hello: place, process, address of the secret, secret, willingness


class _Extent(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Neighbour:
    """Another rank of the group whose memory this one can read."""

    rank: int
    process: int

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy `into.numel()` elements at `address` of the other process to the CPU tensor `into`.

        Raises:
            RuntimeError: the process is gone, or the memory is.

        """
        target, left = into.data_ptr(), into.numel() * into.element_size()
        while left:
            here, there = _Extent(target, left), _Extent(address, left)
            moved = _readv(self.process, here, there)
            if moved <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise RuntimeError(
                    f"rank {self.rank} of the group (process {self.process} on this host) cannot "
                    f"be read any more: {reason}; it has probably died, so look at its log"
                )
            target, address, left = target + moved, address + moved, left - moved


@dataclass(frozen=True)
class RemoteRun:
    """A contiguous run of elements in a neighbour's memory, to be read in pieces."""

    owner: Neighbour
    address: int
    numel: int
    dtype: torch.dtype

    def read(self, start: int, into: torch.Tensor) -> None:
        """Read elements start .. start + into.numel()."""
        self.owner.read(self.address + start * into.element_size(), into)


def _readv(process: int, here: _Extent, there: _Extent) -> int:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    function.restype = ctypes.c_ssize_t
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    moved: int = function(
        ctypes.c_int(process), ctypes.byref(here), one, ctypes.byref(there), one, none
    )
    return moved


def _place() -> tuple[int, ...]:
    """Words that are equal for processes of one boot, process and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("pid", "net")]
    return int(boot[:15], 16), *spaces


def _hello(secret: torch.Tensor, willing: bool) -> torch.Tensor:
    try:
        words = [*_place(), os.getpid(), secret.data_ptr(), int(secret), int(willing)]
    except OSError:  # no /proc: not Linux, or hidden
        words = [0] * _WORDS
    return torch.tensor(words, dtype=torch.int64)


def _believe(rank: int, mine: torch.Tensor, theirs: torch.Tensor) -> Neighbour | None:
    """Return the peer that said `theirs` if its secret can be read where it says."""
    if not (mine[-1] and theirs[-1] and torch.equal(mine[:_PLACE], theirs[:_PLACE])):
        return None
    peer = Neighbour(rank, int(theirs[_PLACE]))
    found = torch.zeros(1, dtype=torch.int64)
    try:
        peer.read(int(theirs[_PLACE + 1]), found)
    except (RuntimeError, AttributeError):  # forbidden by the kernel, or no such call in libc
        return None
    return peer if found.item() == theirs[_PLACE + 2].item() else None


def meet(group: ProcessGroup, *, willing: bool) -> tuple[Neighbour | None, ...]:
    """Find out, with all ranks of `group`, which of them can read each other's memory.

    Collective. Both ends of a pair come to the same answer.

    Returns:
        Per rank of the group the neighbour, or None (also for this rank itself).

    """
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64)
    mine = _hello(secret, willing)
    size, rank = group.size(), group.rank()
    hellos = _swap(group, mine.expand(size, _WORDS).contiguous(), _HELLO_TAG)
    peers = [
        None if place == rank else _believe(place, mine, hellos[place]) for place in range(size)
    ]
    mutual = _swap(group, torch.tensor([[int(peer is not None)] for peer in peers]), _VERDICT_TAG)
    # The verdicts also say that everyone is done with this rank's secret.
    return tuple(
        peer if peer is not None and bool(said) else None
        for peer, said in zip(peers, mutual, strict=True)
    )


def _swap(group: ProcessGroup, rows: torch.Tensor, tag: int) -> torch.Tensor:
    """Send row r to rank r; return what each rank sent here."""
    received = torch.zeros_like(rows)
    works: list[Work | None] = []
    for place in range(group.size()):
        if place != group.rank():
            works.append(dist.irecv(received[place], group=group, group_src=place, tag=tag))
            works.append(dist.isend(rows[place], group=group, group_dst=place, tag=tag))
    for work in works:
        if work is not None:
            work.wait()
    return received
