"""The fork server: imports torch and the lamina layers once, then forks ranks for jobs.

Started by the plugin as `python -m lamina_testing.server FD DIRECTORY MODULE ...`. It stays
single-threaded (a fork copies one thread only) and never touches CUDA (a forked child could not use
it). It ends, with every rank, when its control socket closes: when pytest does, however pytest
ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import fnmatch
import gc
import importlib
import importlib.util
import os
import pkgutil
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
from lamina_testing.rank import RankProcess
from lamina_testing.supervision import Member, Supervision

# Note [Processes that are used again]
#
# A new process costs a rank about 55 ms of CPU time: a fork, first writes to shared pages, and
# everything that torch does once per process. Most bodies need less. So the ranks of a test module
# stay for its next tests, and the tests of another module get others. Each test has a process group
# of its own: all ranks leave it once each of them has an outcome. The test module is executed anew,
# the environment and random seeds are set anew. A process does not stay after a test that did not
# pass, or that changed what `process_state` in rank.py compares. `reuse=False` gives a test
# processes of its own. With CUDA the process group stays as well, and processes outlive the module.
# docs/decisions/0023-ranks-run-a-module.md tells what was weighed.


@dataclass
class Server:
    """Runs jobs one after another; `pools` holds ranks that outlive their job, by number."""

    control: socket.socket
    directory: Path
    loader: ModuleLoader = field(default_factory=ModuleLoader)
    pools: dict[tuple[object, ...], dict[int, Member]] = field(default_factory=dict)
    jobs: int = 0

    def run_forever(self) -> None:
        """Answer requests until the control socket closes."""
        while (request := receive(self.control)) is not None:
            if isinstance(request, DeviceCount):
                send(self.control, self.device_count())
            else:
                with gpus_alone(request):
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
        place = self.directory / f"job{self.jobs}"
        place.mkdir()
        with contextlib.suppress(OSError, SyntaxError):
            self.loader.compile(job.path)  # in vain if it fails: the ranks will say why
        store = place.with_suffix(".store")  # it must outlive the job if the process group does
        pool = self.pool_of(job)
        members = [
            pool.pop(rank) if rank in pool else self.fork(rank) for rank in range(job.processes)
        ]
        port = 0 if job.init else _free_port()
        assignment = Assignment(job, Place(str(place), str(store), port))
        for member in members:
            member.tell(assignment)
        supervision = Supervision(self.control, job, place, members)
        outcomes = supervision.outcomes()
        if job.reuse and supervision.can_stay():
            pool.update({member.rank: member for member in members})
        else:
            supervision.end()
        supervision.collect_output()
        if not job.keeps_group:
            store.unlink(missing_ok=True)
        shutil.rmtree(place)
        return outcomes

    def pool_of(self, job: Job) -> dict[int, Member]:
        """Return the processes that may run this job; end those of another test module."""
        if not job.reuse:
            return {}
        kept = (job.world_size, job.backend, job.device)
        key = kept if job.keeps_group else (job.path,)
        for other in [other for other in self.pools if len(other) == 1 and other != key]:
            self.end_pool(self.pools.pop(other))
        return self.pools.setdefault(key, {})

    def end_pool(self, pool: dict[int, Member]) -> None:
        """Kill processes that wait for a job and have left their process group."""
        for member in pool.values():
            member.end(patience=0.0)

    def fork(self, rank: int) -> Member:
        """Fork one rank's process."""
        ours, theirs = socket.socketpair()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.control.close()
            ours.close()
            RankProcess(theirs, rank, self.loader).serve(server)
        theirs.close()
        return Member(rank, pid, ours)

    def close(self) -> None:
        """End all pooled ranks and remove the run directory."""
        for pool in self.pools.values():
            self.end_pool(pool)
        shutil.rmtree(self.directory, ignore_errors=True)


_PORTS = range(20_000, 32_768)  # below those that Linux gives to connections


def _free_port() -> int:
    """A port that nobody listens on now.

    One of the kernel's choice would be given to a connection of another test before the body
    listens on it.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise RuntimeError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free")


@contextlib.contextmanager
def gpus_alone(job: Job) -> Iterator[None]:
    """Wait for the GPUs, which are there once, where workers of pytest-xdist have a server each."""
    # Each process has virtual GPUs of its own.
    if job.device != "cuda" or importlib.util.find_spec("lamina_virtual_gpu"):
        yield
        return
    path = Path(tempfile.gettempdir()) / f"lamina-testing-gpu-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Closing the file is not enough. Ranks that were forked meanwhile have it open too, and
            # those that wait for their next job would lock this server out for ever.
            fcntl.flock(lock, fcntl.LOCK_UN)


def preload(names: list[str]) -> None:
    """Import modules that tests use; `lamina.*` stands for every layer that is found.

    What does not import is left out: only tests that import it should fail, with its error.
    """
    for name in names:
        for found in _layers(name) if name.startswith("lamina.") else [name]:
            _import_or_forget(found)


def _layers(pattern: str) -> list[str]:
    if importlib.util.find_spec("lamina") is None:
        return []
    namespace: Any = importlib.import_module("lamina")
    layers = pkgutil.iter_modules(namespace.__path__, "lamina.")
    return [layer.name for layer in layers if fnmatch.fnmatchcase(layer.name, pattern)]


def _import_or_forget(name: str) -> None:
    try:
        importlib.import_module(name)
    except Exception:
        # A half-imported package would show the ranks another error than the true one.
        for loaded in [other for other in sys.modules if f"{other}.".startswith(f"{name}.")]:
            del sys.modules[loaded]


# Note [Huge pages make forks cheap]
#
# The imports leave about 250 MiB of private memory in pages of 4 KiB. Every fork copies 60,000
# entries of page tables, and every exit of a rank walks them again. Both take 16 ms per rank, which
# is more than many test bodies need. Linux 6.1 and newer can collapse such memory into pages of
# 2 MiB on request. Then a fork and an exit take 5 ms together. A rank that writes to a huge page
# still copies 4 KiB only. Where the kernel cannot do it, ranks start as slowly as before.

_COLLAPSE = 25  # MADV_COLLAPSE of <linux/mman.h>
_HUGE = 2 << 20


def collapse_pages() -> None:
    """Turn this process's private memory into huge pages where the kernel can."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in maps.read_text().splitlines():
        addresses, permissions, _, device, *_ = line.split()
        if not permissions.startswith("rw-p") or device != "00:00":
            continue  # files and shared memory
        start, end = (int(address, 16) for address in addresses.split("-"))
        for place in range(-(-start // _HUGE) * _HUGE, end - _HUGE + 1, _HUGE):
            madvise(place, _HUGE, _COLLAPSE)


# Note [Ranks do not interrupt each other]
#
# A thread that sends over gloo holds the lock of its connection, and wakes the peer. By default
# Linux may let the woken thread take the sender's core at once, while the lock is held. Then gloo's
# own thread of the sender finds the lock taken and asks again, without a pause, until the sender
# runs on. That was a sixth of all the time of tests on ranks. Under SCHED_BATCH a thread that wakes
# up waits for its turn. Ranks and what they start inherit it, and their share of time is the same.


def schedule_in_turns() -> None:
    """Have threads of this process, and of those it forks, take no core from each other."""
    if hasattr(os, "SCHED_BATCH"):  # Linux
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def main() -> None:
    """Serve the control socket whose file descriptor is the first argument.

    The second is the directory for runs, the others are what to import.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    torch.set_num_threads(1)
    schedule_in_turns()
    preload(sys.argv[3:])
    gc.collect()
    gc.freeze()  # the collector must not touch, and so copy, pages shared with the ranks
    collapse_pages()
    server = Server(control, Path(sys.argv[2]))
    try:
        server.run_forever()
    except EOFError:
        pass
    finally:
        server.close()


if __name__ == "__main__":
    main()
