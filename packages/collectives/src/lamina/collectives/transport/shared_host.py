"""Ranks of one host read each other's memory, where the kernel allows it.

Over loopback a byte is copied into the kernel and out of it, by two threads that wake each other.
Linux can copy it once, from one process's memory into another's (`process_vm_readv`; MPI libraries
call it cross-memory attach). Ranks agree on it when a group is first used: each pair must run on
one boot of one machine, in one process and one network namespace (who puts ranks into different
network namespaces wants them to use the network), and each must really have read a secret out of
the other's memory. Every other pair exchanges messages, with the same results.
"""

import ctypes
import functools
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

from lamina.collectives.transport.groups import timeout_of
from lamina.collectives.transport.host_socket import HostSocket, HostSocketListener
from lamina.mesh.engine import host_words

_HELLO_TAG = (1 << 24) - 2
_VERDICT_TAG = (1 << 24) - 1
_HOST_WORDS = 3
# Of a hello: the host's words, process, address of the secret, secret, listener, willing.
_WORDS = _HOST_WORDS + 5


class _Extent(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class HostPeer:
    """Another rank of the group whose memory this one can read, and the socket to it."""

    rank: int
    process: int
    socket: HostSocket | None = field(default=None, compare=False)

    @property
    def connection(self) -> HostSocket:
        """Where the two tell each other in an exchange with a tag: under twice the tag the sender
        the address and the number of its bytes, and under the next key the receiver how many it
        has read, or expected.
        """
        assert self.socket is not None  # noqa: S101 - only `_believe` makes one without
        return self.socket

    def read(self, address: int, into: torch.Tensor) -> None:
        """Copy `into.numel()` elements at `address` of the other process to the CPU tensor `into`.

        RuntimeError says that the process is gone, or the memory.
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
class RemoteMemory:
    """A contiguous run of elements in another process's memory, to be read in pieces."""

    owner: HostPeer
    address: int
    numel: int
    dtype: torch.dtype

    def read(self, start: int, into: torch.Tensor) -> None:
        """Read elements start .. start + into.numel()."""
        self.owner.read(self.address + start * into.element_size(), into)


@functools.cache
def _process_vm_readv() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).process_vm_readv
    extents = ctypes.POINTER(_Extent)
    count = flags = ctypes.c_ulong
    function.argtypes = (ctypes.c_int, extents, count, extents, count, flags)
    function.restype = ctypes.c_ssize_t
    return cast("Callable[..., int]", function)


def _hello(secret: torch.Tensor, listener: int, willing: bool) -> torch.Tensor:
    try:
        host = host_words()
    except OSError:  # no /proc: not Linux, or hidden
        return torch.zeros(_WORDS, dtype=torch.int64, device="cpu")
    words = [*host, os.getpid(), secret.data_ptr(), int(secret), listener, int(willing)]
    return torch.tensor(words, dtype=torch.int64, device="cpu")


def _believe(rank: int, mine: torch.Tensor, theirs: torch.Tensor) -> HostPeer | None:
    """Return the peer that said `theirs` if its secret can be read where it says."""
    if not (mine[-1] and theirs[-1] and torch.equal(mine[:_HOST_WORDS], theirs[:_HOST_WORDS])):
        return None
    process, address, secret = theirs[_HOST_WORDS : _HOST_WORDS + 3].tolist()
    peer = HostPeer(rank, process)
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    try:
        peer.read(address, word)
    except (RuntimeError, AttributeError):  # forbidden by the kernel, or no such call in libc
        return None
    return peer if word.item() == secret else None


def find_host_peers(group: ProcessGroup, *, willing: bool) -> tuple[HostPeer | None, ...]:
    """Find out which ranks of `group` can read each other's memory: the peers, by rank.

    Collective. Both ends of a pair come to the same answer. None stands for all others, and for
    this rank itself.
    """
    secret = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
    number, listener = secrets.randbits(62), None
    if willing:
        try:
            listener = HostSocketListener(number)
        except (OSError, AttributeError):  # no such sockets here
            willing = False
    size, rank = group.size(), group.rank()
    # A hello says where this rank's secret lies; who reads it there can read all else.
    mine = _hello(secret, number, willing)
    hellos = _exchange_rows(group, mine.expand(size, _WORDS).contiguous(), _HELLO_TAG)
    believed = [None if at == rank else _believe(at, mine, hellos[at]) for at in range(size)]
    verdicts = torch.tensor([[int(peer is not None)] for peer in believed], device="cpu")
    # The verdicts also say that everyone is done with this rank's secret.
    mutual = _exchange_rows(group, verdicts, _VERDICT_TAG).view(-1).tolist()
    if listener is None:
        return (None,) * size
    # The kernel may allow one direction only, so both ends have to have read.
    both = zip(believed, mutual, strict=True)
    peers = {peer.rank: peer.process for peer, said in both if peer and said}
    sockets = _connect(listener, rank, int(secret), peers, hellos, timeout_of(group))
    return tuple(
        HostPeer(at, peers[at], sockets[at]) if at in peers else None for at in range(size)
    )


def _connect(
    listener: HostSocketListener,
    rank: int,
    secret: int,
    peers: dict[int, int],
    hellos: torch.Tensor,
    timeout: float,
) -> dict[int, HostSocket]:
    """Lower ranks connect to higher ones. Connecting needs no answer, so no rank waits.

    `peers` has the process of each rank to be connected with. Callers have to show the secret.
    """
    sockets = {}
    for peer in sorted(peers):
        if peer > rank:
            shown, number = hellos[peer][_HOST_WORDS + 2 : _HOST_WORDS + 4].tolist()
            sockets[peer] = listener.connect(number, rank, shown, peer, timeout)
    callers = {peer: process for peer, process in peers.items() if peer < rank}
    sockets |= listener.accept(callers, secret, timeout)
    listener.close()
    return sockets


def _exchange_rows(group: ProcessGroup, rows: torch.Tensor, tag: int) -> torch.Tensor:
    """Send row r to rank r; return what each rank sent here."""
    received = torch.zeros_like(rows)
    works: list[Work | None] = []
    for peer in range(group.size()):
        if peer != group.rank():
            works.append(dist.irecv(received[peer], group=group, group_src=peer, tag=tag))
            works.append(dist.isend(rows[peer], group=group, group_dst=peer, tag=tag))
    for work in works:
        if work is not None:
            work.wait()
    return received
