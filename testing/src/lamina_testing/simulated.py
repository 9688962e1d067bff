"""One process as rank 0 of many: collectives that move nothing, and counts of what was asked for.

`simulated_world` starts torch's "fake" group of any size, and replaces the methods of
`ProcessGroup` that communicate. They return at once and leave their outputs as they are, so what
a step costs is what the host does. `Traffic` says what this rank would have sent, with hosts of a
fixed number of consecutive ranks:

- An all-to-all sends every other rank its own piece: one message for each of them.
- The other collectives are the backend's, which chooses a ring or a tree. Their bytes are those
  that other ranks need from this one, whoever passes them on, and their messages are the logarithm
  of the number of ranks, as of a tree.

`Operations` counts the operators that PyTorch runs, on this thread and on threads that start
meanwhile (collectives have threads of their own).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

_GATHERS = ("_allgather_base", "all_gather_single", "allgather", "allgather_into_tensor_coalesced")
_SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced")
_EXCHANGES = ("alltoall", "alltoall_base", "all_to_all_single")
_SUMS = ("allreduce", "allreduce_coalesced")
_SINGLE = ("broadcast", "send", "recv")


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class Traffic:
    """What this rank asked its process groups for.

    Attributes:
        per_host: ranks of a host.
        calls: how often each method of `ProcessGroup` was called.
        messages: messages that this rank sends.
        far: those of them that go to other hosts.
        inside: bytes that this rank sends to ranks of its own host.
        between: bytes that it sends to other hosts.
        listed: the most tensors that one call was given in a list.
    """

    per_host: int = 8
    calls: Counter[str] = field(default_factory=Counter)
    messages: int = 0
    far: int = 0
    inside: int = 0
    between: int = 0
    listed: int = 0
    _neighbours: dict[str, int] = field(default_factory=dict, repr=False)

    def clear(self) -> None:
        """Count anew."""
        self.calls.clear()
        self.messages = self.far = self.inside = self.between = self.listed = 0

    def note(self, name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        """Count one call of the method `name`."""
        self.calls[name] += 1
        lists = [len(value) for value in args if isinstance(value, list)]
        self.listed = max((self.listed, *lists))
        size = group.size()
        peers = size - 1
        if name in _EXCHANGES:
            piece = _nbytes(args[1]) / size
        elif name in _GATHERS:
            piece = _nbytes(args[1])
        elif name in _SCATTERS:
            piece = _nbytes(args[0])
        elif name in _SUMS:
            piece = 2 * _nbytes(args[0]) / size
        else:
            piece, peers = _nbytes(args[0]), peers if name == "broadcast" else 1
        near = min(peers, self._near(group))
        tree = name not in _EXCHANGES
        self.messages += peers.bit_length() if tree else peers
        self.far += peers.bit_length() - near.bit_length() if tree else peers - near
        self.inside += int(near * piece)
        self.between += int((peers - near) * piece)

    def _near(self, group: dist.ProcessGroup) -> int:
        """How many other ranks of the group are on this host."""
        if group.group_name not in self._neighbours:
            ranks = dist.get_process_group_ranks(group)
            here = ranks[group.rank()] // self.per_host
            self._neighbours[group.group_name] = sum(r // self.per_host == here for r in ranks) - 1
        return self._neighbours[group.group_name]


def _nbytes(value: torch.Tensor | Sequence[Any]) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else sum(map(_nbytes, value))


@contextlib.contextmanager
def simulated_world(ranks: int, per_host: int = 8, *, hosts: bool = False) -> Iterator[Traffic]:
    """This process is rank 0 of `ranks`; no process group may be there before.

    Args:
        ranks: of the world.
        per_host: ranks of a host, for what `Traffic` counts.
        hosts: whether Lamina knows of these hosts, too. Otherwise it takes all for one.
    """
    traffic = Traffic(per_host)

    def counted(name: str) -> Callable[..., object]:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> object:
            traffic.note(name, group, args)
            return _Done()

        return call

    with contextlib.ExitStack() as stack:
        for name in (*_GATHERS, *_SCATTERS, *_EXCHANGES, *_SUMS, *_SINGLE):
            if hasattr(dist.ProcessGroup, name):  # versions of torch differ in which there are
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, counted(name)))
        if hosts:
            told = {"LAMINA_RANKS_PER_HOST": str(min(per_host, ranks))}
            stack.enter_context(mock.patch.dict(os.environ, told))
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        stack.callback(dist.destroy_process_group)
        yield traffic


class Operations:
    """Counts operators by name while it is entered: `counts`, and their sum `total`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()

    @property
    def total(self) -> int:
        """Operators of all names."""
        return self.counts.total()

    def __enter__(self) -> Operations:
        begin, counts = threading.Thread.run, self.counts

        def run(thread: threading.Thread) -> None:
            with _Mode(counts):
                begin(thread)

        self._stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        self._stack.enter_context(_Mode(counts))
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the operator and run it."""
        self._counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
