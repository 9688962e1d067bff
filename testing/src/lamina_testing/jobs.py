"""Messages between the pytest process, the fork server and the ranks, and how they travel.

All three run the same code on the same machine, so messages are pickled dataclasses with a length
in front. Nothing here imports torch.
"""

from __future__ import annotations

import pickle
import signal
import socket
import struct
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["passed", "failed", "skipped", "xfailed", "died", "hung"]

STACK_SIGNAL = signal.SIGUSR1  # a rank answers it by writing its Python stacks
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Argument:
    """One argument of a body: pickled, or the place of its value in a `parametrize` mark.

    Values such as lambdas cannot be pickled; the rank then takes `position` of the argument
    values of the mark that names the argument, in the module it has imported itself.
    """

    pickled: bytes | None
    position: int | None = None


@dataclass(frozen=True)
class Job:
    """One test body to be run on every rank of one world.

    `reuse` lets the ranks' processes outlive the job. See Note [Processes that are used again].
    `tensors_on_device` makes the rank's device the default of its body.
    """

    module_name: str
    path: str
    qualname: tuple[str, ...]
    arguments: dict[str, Argument]
    world_size: int
    backend: str
    device: str
    timeout: float
    init: bool
    environment: dict[str, str]
    directory: str
    sys_path: list[str]
    warning_filters: list[str]
    reuse: bool
    traceback_style: str
    show_locals: bool
    tensors_on_device: bool = False

    @property
    def processes(self) -> int:
        """Processes to start: one per rank, but one in all for the fake backend."""
        return 1 if self.backend == "fake" else self.world_size

    @property
    def keeps_group(self) -> bool:
        """Whether the process group outlives the job too: starting CUDA and NCCL takes seconds."""
        return self.reuse and self.device == "cuda"


@dataclass(frozen=True)
class Place:
    """Where the server has laid things for one job, and where its ranks find each other.

    `store` is the file that the process group meets at; `port` is for bodies that make their own.
    """

    directory: str
    store: str
    port: int


@dataclass(frozen=True)
class Assignment:
    """A job as it is handed to a rank's process."""

    job: Job
    place: Place


@dataclass(frozen=True)
class Release:
    """Tells a rank that all have an outcome: leave the process group, and exit unless it stays.

    A rank that stays answers once it has left; one that cannot leave exits all the same.
    """

    stays: bool = False


@dataclass(frozen=True)
class DeviceCount:
    """Question to the server: how many GPUs are there? Answered by an integer."""


@dataclass
class RankWarning:
    """A warning recorded on a rank, to be issued again in the pytest process."""

    category: bytes
    message: str
    filename: str
    lineno: int


@dataclass
class RankOutcome:
    """How one rank ended.

    `time` is when, on the machine's monotonic clock in seconds; `summary` one line; `text`
    the formatted traceback or the stack of a rank that had to be killed. `reusable` says that
    the process is as it was before the body, so that another body can follow. `value` is what the
    body returned, pickled; empty for None. `for_all_ranks` says that a skip ends the whole job.
    """

    rank: int
    status: Status
    time: float
    summary: str = ""
    text: str = ""
    warnings: list[RankWarning] = field(default_factory=list)
    stdout: str = ""
    stderr: str = ""
    reusable: bool = False
    value: bytes = b""
    for_all_ranks: bool = False


def send(connection: socket.socket, message: object) -> None:
    """Send one message."""
    payload = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(connection: socket.socket) -> Any:
    """Receive one message; None when the other end is closed or gone."""
    header = _receive_exactly(connection, _LENGTH.size)
    if header is None:
        return None
    payload = _receive_exactly(connection, _LENGTH.unpack(header)[0])
    return None if payload is None else pickle.loads(payload)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    chunks: list[bytes] = []
    while size > 0:
        try:
            chunk = connection.recv(min(size, 1 << 20))
        except ConnectionError:
            return None
        if not chunk:
            return None
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
