"""As a process ends, wait until autograd's threads have let go of Python's objects."""

from __future__ import annotations

import atexit
import time
from pathlib import Path

LONGEST = 2.0
"""Seconds after which a thread that still computes is left alone."""


def wait_at_exit() -> None:
    """Have this process wait for autograd's threads before its interpreter ends."""
    # Note [Autograd's threads at exit]
    # torch gives each backward a copy of Python's context variables, and the device's thread drops
    # it after the backward's caller goes on. For that it needs the interpreter's lock, which the
    # caller may not give back before it ends: a switch takes 5 ms, and a device that computes
    # nothing is never waited for. A thread that asks a finished interpreter for its lock is
    # unwound, and C++ aborts the process ("terminate called without an active exception"). Nothing
    # in that is this device's own, but a program on a GPU mostly waits for it before it ends.
    atexit.register(_wait_for_rest)


def _wait_for_rest() -> None:
    deadline = time.monotonic() + LONGEST
    threads = [task for task in Path("/proc/self/task").glob("*") if _is_autograds(task)]
    if not threads:
        return
    rested = 0
    while rested < 2 and time.monotonic() < deadline:
        time.sleep(0.001)  # gives the lock away
        rested = rested + 1 if all(_rests(task) for task in threads) else 0


def _is_autograds(task: Path) -> bool:
    return _read(task / "comm").startswith("pt_autograd")


def _rests(task: Path) -> bool:
    """Whether a thread waits for work, or has ended: it neither runs nor wants to."""
    state = _read(task / "stat").rpartition(")")[2].split()
    return not state or state[0] == "S"


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the thread has ended
        return ""
