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
import functools
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
import torch.distributed as dist

from lamina.collectives.transport.compat import timeout_of
from lamina.collectives.transport.host_socket import Line, Listener

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

    from lamina.collectives.transport.chunked_messages import MessageRun

__all__ = ["Chunk", "Neighbour", "RemoteRun", "meet"]

_HELLO_TAG = (1 << 24) - 2
_VERDICT_TAG = (1 << 24) - 1
_PLACE = 3
_WORDS = _PLACE + 5  # of a hello: place, process, address of the secret, secret, listener, willing


class _Extent(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Neighbour:
    """Another rank of the group whose memory this one can read, and the line to it."""

    rank: int
    process: int
    line: Line | None = field(default=None, compare=False)

    def note(self, tag: int, address: int, nbytes: int) -> None:
        """Tell the neighbour where the bytes of an exchange lie."""
        self._line.send(2 * tag, address, nbytes)

    def take_note(self, tag: int) -> tuple[int, int]:
        """Wait for the neighbour's note: address and number of bytes."""
        return self._line.take(2 * tag)

    def receipt(self, tag: int, nbytes: int) -> None:
        """Tell the neighbour that its bytes were read (or how many were expected)."""
        self._line.send(2 * tag + 1, nbytes, 0)

    def take_receipt(self, tag: int) -> int:
        """Wait for the neighbour's receipt: the number of bytes it read, or expected."""
        return self._line.take(2 * tag + 1)[0]

    @property
    def _line(self) -> Line:
        assert self.line is not None  # noqa: S101 - only `_believe` makes one without
        return self.line

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy `into.numel()` elements at `address` of the other process to the CPU tensor `into`.

        Raises:
            RuntimeError: the process is gone, or the memory is.
        """
        readv = _process_vm_readv()
        target, left = into.data_ptr(), into.numel() * into.element_size()
        while left:
            here, there = _Extent(target, left), _Extent(address, left)
            moved = readv(self.process, here, 1, there, 1, 0)
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


Chunk: TypeAlias = "torch.Tensor | RemoteRun | MessageRun"
"""What one rank contributes to a sum: here, in a neighbour's memory, or on its way."""


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    extents = ctypes.POINTER(_Extent)
    count = flags = ctypes.c_ulong
    function.argtypes = (ctypes.c_int, extents, count, extents, count, flags)
    function.restype = ctypes.c_ssize_t
    return cast("Callable[..., int]", function)


def _place() -> tuple[int, ...]:
    """Words that are equal for processes of one boot, process and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
    spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("pid", "net")]
    return int(boot[:15], 16), *spaces


def _hello(secret: torch.Tensor, listener: int, willing: bool) -> torch.Tensor:
    try:
        place = _place()
    except OSError:  # no /proc: not Linux, or hidden
        return torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
    words = [*place, os.getpid(), secret.data_ptr(), int(secret), listener, int(willing)]
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _believe(rank: int, mine: torch.Tensor, theirs: torch.Tensor) -> Neighbour | None:
    """Return the peer that said `theirs` if its secret can be read where it says."""
    if not (mine[-1] and theirs[-1] and torch.equal(mine[:_PLACE], theirs[:_PLACE])):
        return None
    peer = Neighbour(rank, int(theirs[_PLACE]))
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
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
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
    number, listener = secrets.randbits(62), None
    if willing:
        try:
            listener = Listener(number)
        except (OSError, AttributeError):  # no such sockets here
            willing = False
    size, rank = group.size(), group.rank()
    mine = _hello(secret, number, willing)
    hellos = _swap(group, mine.expand(size, _WORDS).contiguous(), _HELLO_TAG)
    peers = [
        None if place == rank else _believe(place, mine, hellos[place]) for place in range(size)
    ]
    verdicts = torch.tensor([[int(peer is not None)] for peer in peers], device="cpu")
    mutual = _swap(group, verdicts, _VERDICT_TAG)
    # The verdicts also say that everyone is done with this rank's secret.
    believed = {
        peer.rank: peer
        for peer, said in zip(peers, mutual.view(-1).tolist(), strict=True)
        if peer is not None and said
    }
    if listener is None:
        return (None,) * size
    lines = _connect(listener, rank, int(secret), believed, hellos, timeout_of(group))
    return tuple(
        Neighbour(place, believed[place].process, lines[place]) if place in believed else None
        for place in range(size)
    )


def _connect(
    listener: Listener,
    rank: int,
    secret: int,
    peers: dict[int, Neighbour],
    hellos: torch.Tensor,
    timeout: float,
) -> dict[int, Line]:
    """Lower ranks call higher ones. A call needs no answer to go through, so none waits."""
    lines = {}
    for peer in sorted(peers):
        if peer > rank:
            shown, number = (int(hellos[peer][_PLACE + word]) for word in (2, 3))
            lines[peer] = listener.call(number, rank, shown, peer, timeout)
    lines |= listener.answer({peer for peer in peers if peer < rank}, secret, timeout)
    listener.close()
    return lines


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
