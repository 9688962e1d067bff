"""The fork server: imports torch and the lamina layers once, then forks ranks for every job.

Started by the plugin as ``python -m lamina_testing.server FD DIRECTORY``. It stays single-threaded
(a fork copies one thread only) and never touches CUDA (a forked child could not use it). It ends,
with every rank, when its control socket closes: when pytest does, however pytest ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import pkgutil
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

from lamina_testing.jobs import (
    Assignment,
    DeviceCount,
    Job,
    Place,
    RankOutcome,
    receive,
    send,
)
from lamina_testing.modules import ModuleLoader
from lamina_testing.rank import STACK_SIGNAL, serve

_GRACE = 5.0  # seconds that other ranks get to end by themselves after one has failed
_DUMP = 0.5  # seconds for a rank to write its stacks
_OUTPUT_LIMIT = 40_000  # characters of a rank's output that are shown, from its end
_POLL = 0.05


@dataclass
class Member:
    """One rank's process, seen from the server."""

    rank: int
    pid: int
    connection: socket.socket
    exit_status: int | None = None

    def has_exited(self) -> bool:
        """Look, without reaping, whether the process has ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def end(self, patience: float) -> int:
        """Reap the process, killing it and what it started after ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while not self.has_exited() and time.monotonic() < deadline:
            time.sleep(0.002)
        # While the leader is not reaped its id cannot be reused, so this hits nobody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass
class Server:
    """Runs jobs one after another; ``pools`` holds ranks that outlive their job (NCCL)."""

    control: socket.socket
    directory: Path
    loader: ModuleLoader = field(default_factory=ModuleLoader)
    pools: dict[tuple[int, str, str], tuple[list[Member], Path]] = field(default_factory=dict)
    jobs: int = 0

    def run_forever(self) -> None:
        """Answer requests until the control socket closes."""
        while (request := receive(self.control)) is not None:
            if isinstance(request, DeviceCount):
                send(self.control, self.device_count())
            else:
                with _gpu_lock(request):
                    send(self.control, self.run(request))

    def device_count(self) -> int:
        """Count GPUs in a child: asking CUDA may start it, and then no fork could use it."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.write(writing, str(torch.cuda.device_count()).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            count = answer.read()
        os.waitpid(pid, 0)
        return int(count or 0)

    def run(self, job: Job) -> list[RankOutcome]:
        """Run one job and return every rank's outcome, in rank order."""
        self.jobs += 1
        key = (job.world_size, job.backend, job.device)
        place = self.directory / f"job{self.jobs}"
        place.mkdir()
        with contextlib.suppress(OSError, SyntaxError):
            self.loader.compile(job.path)  # in vain if it fails: the ranks will say why
        members = self.pools.pop(key, ([], place))[0] if job.reuse else []
        if not members:
            members = [self.fork(rank) for rank in range(job.processes)]
        assignment = Assignment(job, Place(str(place), 0 if job.init else _free_port()))
        for member in members:
            with contextlib.suppress(BrokenPipeError):
                send(member.connection, assignment)
        outcomes = Supervision(self.control, job, place, members).outcomes()
        if job.reuse and all(outcome.status == "passed" for outcome in outcomes):
            # The pool's file store stays where its first job laid it.
            self.pools[key] = (members, place)
        else:
            for member in members:
                member.end(patience=2.0)
            shutil.rmtree(place, ignore_errors=True)
        return outcomes

    def fork(self, rank: int) -> Member:
        """Fork one rank's process."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            ours.close()
            serve(theirs, rank, self.loader)
        theirs.close()
        return Member(rank, pid, ours)

    def close(self) -> None:
        """End all pooled ranks and remove the run directory."""
        for members, _ in self.pools.values():
            for member in members:
                member.end(patience=0.0)
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclass
class Supervision:
    """Watches the ranks of one job until each has reported, died or been given up."""

    control: socket.socket
    job: Job
    place: Path
    members: list[Member]
    known: dict[int, RankOutcome] = field(default_factory=dict)

    def outcomes(self) -> list[RankOutcome]:
        """Wait for all ranks; at the deadline take stacks of those that still run."""
        deadline = time.monotonic() + self.job.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            for member in self.members:
                selector.register(member.connection, selectors.EVENT_READ, member)
            failed = False
            while self.running() and time.monotonic() < deadline:
                for key, _ in selector.select(timeout=_POLL):
                    if key.data is None:
                        self.abandon()
                    self.take(key.data, receive(key.data.connection))
                    selector.unregister(key.data.connection)
                for member in self.running():
                    # Its socket may be held open by a process that the body has started.
                    if member.has_exited() and not _readable(member.connection):
                        self.take(member, None)
                        selector.unregister(member.connection)
                bad = any(o.status in ("failed", "died") for o in self.known.values())
                if bad and not failed:
                    failed, deadline = True, min(deadline, time.monotonic() + _GRACE)
        self.give_up()
        result = [self.known[member.rank] for member in self.members]
        for outcome in result:
            outcome.stdout = self.output(outcome.rank, "out")
            outcome.stderr = self.output(outcome.rank, "err")
        return result

    def running(self) -> list[Member]:
        """Ranks without an outcome yet."""
        return [member for member in self.members if member.rank not in self.known]

    def take(self, member: Member, outcome: RankOutcome | None) -> None:
        """Enter a rank's own report, or, where it left none, how its process ended."""
        if outcome is None:
            now = time.monotonic()
            ending = _ending(member)
            outcome = RankOutcome(member.rank, "died", now, ending)
        self.known[member.rank] = outcome

    def give_up(self) -> None:
        """Take the stacks of ranks that still run, then kill them."""
        waiting = self.running()
        if not waiting:
            return
        for member in waiting:
            os.kill(member.pid, STACK_SIGNAL)
        time.sleep(_DUMP)
        now = time.monotonic()
        for member in waiting:
            stack = _own_frames(self.output(member.rank, "stack"))
            if not stack:
                stack = "(no stack: the process did not answer; stopped, or in a system call)"
            self.known[member.rank] = RankOutcome(member.rank, "hung", now, text=stack)
        for member in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(member.pid, signal.SIGKILL)

    def abandon(self) -> None:
        """Pytest is gone (its socket closed): leave nothing behind."""
        for member in self.members:
            member.end(patience=0.0)
        raise EOFError

    def output(self, rank: int, kind: str) -> str:
        """Read what a rank has written, at most its last part."""
        path = self.place / f"{rank}.{kind}"
        text = path.read_text(errors="replace") if path.exists() else ""
        if len(text) > _OUTPUT_LIMIT:
            cut = len(text) - _OUTPUT_LIMIT
            text = f"[{cut} characters left out]\n{text[cut:]}"
        return text


def _ending(member: Member) -> str:
    for _ in range(200):
        if member.has_exited():
            break
        time.sleep(0.005)
    info = os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None:
        return "closed its connection to the test server"
    if info.si_code == os.CLD_EXITED:
        return f"exited with code {info.si_status} before its body ended"
    return f"was killed by {signal.Signals(info.si_status).name}"


def _own_frames(stack: str) -> str:
    # The lowest frames are this plugin's, the same in every rank.
    lines = [line for line in stack.splitlines() if "/lamina_testing/" not in line]
    lines = [line for line in lines if '"<frozen runpy>"' not in line]
    return "\n".join(lines)


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _gpu_lock(job: Job) -> Iterator[None]:
    # Workers of pytest-xdist have a server each, but the GPUs are there only once.
    if job.device != "cuda":
        yield
        return
    path = Path(tempfile.gettempdir()) / f"lamina-testing-gpu-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def import_layers() -> dict[str, str]:
    """Import every lamina layer that imports; return the error of each that doesn't.

    A broken layer is left out, not fatal: only tests that import it should fail, with its error.
    """
    failed: dict[str, str] = {}
    if importlib.util.find_spec("lamina") is None:
        return failed
    namespace: Any = importlib.import_module("lamina")
    for info in pkgutil.iter_modules(namespace.__path__, "lamina."):
        try:
            importlib.import_module(info.name)
        except Exception as error:
            failed[info.name] = f"{type(error).__name__}: {error}"
            for name in [n for n in sys.modules if f"{n}.".startswith(f"{info.name}.")]:
                del sys.modules[name]
    return failed


def main() -> None:
    """Serve the control socket whose file descriptor is the first argument."""
    control = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    import_layers()
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, pages shared with the ranks
    server = Server(control, Path(sys.argv[2]))
    try:
        server.run_forever()
    except EOFError:
        pass
    finally:
        server.close()


if __name__ == "__main__":
    main()
