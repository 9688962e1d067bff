"""Watches the processes of one world: reports, deaths, hangs, and a clean end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from lamina_testing.busy_clock import BusyClock, share_of_a_core
from lamina_testing.jobs import STACK_SIGNAL, Job, RankOutcome, Release, receive, send

# The first three are seconds of `BusyClock`, which goes slower on a busy machine.
_GRACE = 5.0  # seconds that other ranks get to end by themselves after one has failed
_HOLD = 10.0  # seconds that ranks which have passed stay connected for the others
_END = 10.0  # seconds to leave the process group and exit
_DUMP = 0.5  # seconds for a rank to write its stacks
_OUTPUT_LIMIT = 40_000  # characters of a rank's output that are shown, from its end
_POLL = 0.05
_BAD = ("failed", "died", "hung")


@dataclass
class Member:
    """One rank's process, seen from the server."""

    rank: int
    pid: int
    connection: socket.socket

    def has_exited(self) -> bool:
        """Look, without reaping, whether the process has ended."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def tell(self, message: object) -> None:
        """Send a message, if the process is still there to read it."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.connection, message)

    def end(self, patience: float) -> int:
        """Reap the process; after `patience` seconds, kill it. Returns its exit code.

        Processes that it has started are killed in any case. A negative code is a signal's.
        """
        deadline = time.monotonic() + patience
        while not self.has_exited() and time.monotonic() < deadline:
            time.sleep(0.001)
        # While the leader is not reaped its id cannot be reused, so this hits nobody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.connection.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Supervision:
    """Watches the ranks of one job until each has reported, died or been given up.

    A rank that has passed keeps its process group until the others have an outcome too: one that
    closed its connections at once would break peers that are still making theirs. Not for long,
    though: a peer that waits for a collective which never comes should learn it soon.
    """

    def __init__(self, control: socket.socket, job: Job, place: Path, members: list[Member]):
        self.control = control
        self.job = job
        self.place = place
        self.members = members
        self.known: dict[int, RankOutcome] = {}
        self.heard: dict[int, float] = {}  # when each outcome came, by the clock
        self.released = False
        self.clock = BusyClock()
        self.deadline = job.timeout

    def outcomes(self) -> list[RankOutcome]:
        """Wait for all ranks; at the deadline take stacks of those that still run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ)
            for member in self.members:
                selector.register(member.connection, selectors.EVENT_READ, member)
            while self.running() and self.clock.seconds() < self.deadline:
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
                self.hasten()
        self.give_up()
        self.skip_for_all()
        return [self.known[member.rank] for member in self.members]

    def running(self) -> list[Member]:
        """Ranks without an outcome yet."""
        return [member for member in self.members if member.rank not in self.known]

    def take(self, member: Member, outcome: RankOutcome | None) -> None:
        """Enter a rank's own report, or, where it left none, how its process ended."""
        if outcome is None:
            now = time.monotonic()
            outcome = RankOutcome(member.rank, "died", now, _ending(member))
        self.known[member.rank] = outcome
        self.heard[member.rank] = self.clock.seconds()

    def hasten(self) -> None:
        """Once a rank has failed, or passed long ago, don't let the others wait for it."""
        now = self.clock.seconds()
        if any(outcome.status in _BAD or outcome.for_all_ranks for outcome in self.known.values()):
            self.deadline = min(self.deadline, now + _GRACE)
            self.release()
        elif any(at + _HOLD < now for at in self.heard.values()):
            self.release()
            if self.is_steered():
                self.deadline = now

    def release(self) -> None:
        """Let the ranks that have reported leave their process group and exit."""
        if self.released or self.job.keeps_group:
            return
        self.released = True
        for member in self.members:
            member.tell(Release())

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

    def is_steered(self) -> bool:
        """Whether a rank's program has read a number that a virtual GPU did not compute."""
        return any(self.place.glob("*.steered"))

    def skip_for_all(self) -> None:
        """Where a rank has skipped the test for all, count nothing that others did afterwards.

        Ranks that numbers steer, which nothing has computed, wait for each other for no fault.
        """
        hung = [outcome for outcome in self.known.values() if outcome.status == "hung"]
        if hung and self.is_steered():
            for outcome in hung:
                outcome.status, outcome.text, outcome.for_all_ranks = "skipped", "", True
                outcome.summary = "no arithmetic: ranks wait for each other after one read a value"
        skips = [outcome for outcome in self.known.values() if outcome.for_all_ranks]
        if not skips:
            return
        first = min(skips, key=lambda outcome: outcome.time)
        for outcome in self.known.values():
            if outcome.status in _BAD and outcome.time > first.time:
                outcome.status, outcome.summary, outcome.text = "skipped", first.summary, ""
                outcome.for_all_ranks = True

    def can_stay(self) -> bool:
        """Have all ranks leave their process group; return whether a next job may use them."""
        if self.released or not all(outcome.reusable for outcome in self.known.values()):
            return False
        if self.job.keeps_group:
            return True
        for member in self.members:
            member.tell(Release(stays=True))
            member.connection.settimeout(_END / share_of_a_core())
        try:
            return all(receive(member.connection) is not None for member in self.members)
        except TimeoutError:
            return False
        finally:
            for member in self.members:
                member.connection.settimeout(None)

    def end(self) -> None:
        """End all processes; a rank that passed but cannot end has not passed."""
        self.release()
        for member in self.members:
            code = member.end(patience=_END / share_of_a_core() if self.released else 0.0)
            outcome = self.known[member.rank]
            ended_here = outcome.status in _BAD or outcome.for_all_ranks
            if self.released and not ended_here and code != 0:
                reason = f"exited with code {code}" if code > 0 else f"was killed by {_name(-code)}"
                if -code == signal.SIGKILL:
                    reason = f"did not end within {_END:g} s"
                outcome.status = "died"
                outcome.summary = f"passed, but leaving the process group it {reason}"

    def collect_output(self) -> None:
        """Add to every outcome what the rank has written."""
        for outcome in self.known.values():
            outcome.stdout = self.output(outcome.rank, "out")
            outcome.stderr = self.output(outcome.rank, "err")

    def abandon(self) -> None:
        """Pytest is gone (its socket closed): leave nothing behind. Raises EOFError."""
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
    deadline = time.monotonic() + 1.0
    while not member.has_exited() and time.monotonic() < deadline:
        time.sleep(0.005)
    info = os.waitid(os.P_PID, member.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if info is None:
        return "closed its connection to the test server"
    if info.si_code == os.CLD_EXITED:
        return f"exited with code {info.si_status} before its body ended"
    return f"was killed by {_name(info.si_status)}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have none
        return f"signal {number}"


def _own_frames(stack: str) -> str:
    # The outermost frames are this plugin's, the same in every rank.
    places = ("/lamina_testing/rank.py", "/lamina_testing/server.py", "<frozen runpy>")
    return "\n".join(line for line in stack.splitlines() if not any(p in line for p in places))


def _readable(connection: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(timeout=0))
