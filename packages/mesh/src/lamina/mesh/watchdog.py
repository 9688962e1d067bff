"""A thread that knows who is gone and, when a wait lasts, who waits for whom.

Note [The watchdog talks over the store]
A group that hangs cannot tell why it hangs, so ranks talk over a connection of their own to the
store they met at. A rank that has waited longer than the soft limit sounds an alarm. Then each rank
publishes what it waits for, its last collectives and its Python stack, and the first rank that
answers puts all reports into words. Each rank also looks at the processes of its own host. A rank
that dies is known there within a second, and its host's news tell the other hosts. In a run without
faults a rank reads one key of the store and some lines of /proc each second
(docs/decisions/0107-the-watchdog.md).

Note [A host that is silent]
Nobody is left to tell of a host that is down, or whose link is cut. So the ranks of a job on
several hosts count for their host in the store every other second, and the first rank of each host
watches the count of the next host. Nor can the host whose link is cut ask the store: its calls do
not return for many minutes. So one thread asks the store, and another one, which never does, sees
that no answer comes. A host is lost after half the soft limit, and after 10 s at least. Once a
transport has failed, something is wrong for certain, and 6 s are enough
(docs/decisions/0108-hosts-that-are-silent.md).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its stubs
from torch.distributed import distributed_c10d as c10d

from lamina.mesh.verdict import Report, Wait, verdict

__all__ = ["EXIT_STATUS", "Activity", "Watchdog"]

EXIT_STATUS = 70
"""Exit status of a rank that waited for one that is gone, until the watchdog ended it."""
FINISHED = "it has finished"
_PATIENCE = 5.0
_ANSWERS_WITHIN = 4.0
_ENDS_WITHIN = 2.0
_BEAT = 2.0
_SILENCE_AFTER_FAILURE = 6.0
_SLOW_NETWORK = 10e6  # bytes per second
_POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")
"""Functions of torch's in which a rank waits for one other, and not for a group."""
# Files that are not the user's program. The user's own directory may be called "lamina" or "torch",
# so words in a path say nothing.
_FOREIGN = (
    *(os.path.join(place, "") for place in sys.modules["lamina"].__path__),
    os.path.join(os.path.dirname(torch.__file__), ""),
    threading.__file__,
)


@dataclass(frozen=True)
class Activity:
    """What a rank does in collectives: those that have not ended, and the last ones in words."""

    waits: Sequence[Wait] = ()
    recent: Sequence[str] = ()
    idle: float = 0.0
    """Seconds since the last collective was issued."""


class Watchdog:
    """Watches over this rank's waits and over the other processes of its host.

    It has its own connection to the `store` where the ranks have met. A wait is told of after
    `soft_limit` seconds; the first rank writes verdicts to `directory`, or among temporary files.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        soft_limit: float,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        self.lost: str | None = None
        """Which rank is gone and why, once that is known."""
        self.before_end: Callable[[], None] | None = None
        """Called once before the process of a rank that still waits is ended."""
        self._store: Any = cast(Any, store).clone()
        self._rank, self._world_size, self._soft_limit = rank, world_size, soft_limit
        self._directory = Path(tempfile.gettempdir() if directory is None else directory)
        self._here = f"rank {rank}"
        self._source: Callable[[], Activity] = Activity
        self._making: tuple[str, tuple[int, ...], float] | None = None
        self._on_host: dict[int, tuple[int, str]] = {}
        self._pause = max(min(1.0, soft_limit / 4), world_size / 2000)
        self._news = 0
        self._next_alarm = soft_limit
        self._answered: dict[int, float] = {}  # alarms without a verdict, and since when
        self._lost_since = 0.0
        self._still: tuple[object, float] = (None, 0.0)
        self._main = threading.main_thread().ident
        self._end, self._wake = threading.Event(), threading.Event()
        self._suspects: tuple[int, ...] = ()  # members of a collective that fails
        self._failed_at = -math.inf
        self._longest_silence = max(10.0, soft_limit / 2, 4 * self._pause)
        self._host_number = 0  # of this host among all, on its first rank
        self._next_beat, self._heard = 0.0, ((0, 0), 0.0)
        self._server = ""  # whose store it is
        self._asking_since: float | None = None
        self._host = f"host/{_host_name()}"
        number = self._store.add(f"{self._host}/count", 1)
        me = [rank, os.getpid(), (_state_of(os.getpid()) or ("", ""))[1]]
        self._store.set(f"{self._host}/{number}", json.dumps(me))
        if number == 1:
            self._host_number = self._store.add("hosts", 1)
            self._store.set(
                f"hosts/{self._host_number}", json.dumps([self._host, socket.gethostname()])
            )
        if rank == 0:
            self._store.set("server", socket.gethostname())
        self._threads = [
            threading.Thread(target=self._watch, name="lamina-watchdog", daemon=True),
            threading.Thread(target=self._guard, name="lamina-watchdog-guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)

    def watch(self, source: Callable[[], Activity]) -> None:
        """Ask `source` what this rank does in collectives."""
        self._source = source

    @contextlib.contextmanager
    def making(self, group: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """The body makes a process group, and waits for its members."""
        self._making = group, ranks, time.monotonic()
        try:
            yield
        finally:
            self._making = None

    def _activity(self) -> Activity:
        """What this rank waits for, the making of a group included."""
        activity, now = self._source(), time.monotonic()
        if (making := self._making) is not None:
            group, ranks, since = making
            wait: Wait | None = Wait("the making of a group", group, 0, now - since, ranks)
        else:
            wait = None if activity.waits else self._wait_in_torch()
        return activity if wait is None else replace(activity, waits=[wait, *activity.waits])

    def _look_at_main(self) -> FrameType | None:
        """Where the main thread is; notes since when it is there."""
        frame = sys._current_frames().get(self._main or 0)
        spot = None if frame is None else (id(frame), frame.f_lasti)
        if spot != self._still[0]:
            self._still = spot, time.monotonic()
        return frame

    def _wait_in_torch(self) -> Wait | None:
        """The collective of torch's own that the main thread waits in, where that is to be seen.

        Torch tells nobody of these, but its function stands on the stack, with its group and its
        tensors. A wait for a handle (`work.wait()`) has no such function.

        Note [Who has left a broadcast]
        The source of a broadcast may have gone on while others still receive. So a wait counts
        from when the bytes would have come on a slow network.
        """
        frame, call = self._look_at_main(), None
        while frame is not None and frame.f_code.co_filename.startswith(_FOREIGN):
            if frame.f_code.co_filename == c10d.__file__ and "group" in frame.f_code.co_varnames:
                call = frame  # the outermost one is what the program has called
            frame = frame.f_back
        if call is None or call.f_code.co_name in _POINT_TO_POINT or not dist.is_initialized():
            return None
        group = call.f_locals.get("group") or dist.group.WORLD
        if not isinstance(group, dist.ProcessGroup):
            return None
        members, nbytes = tuple(dist.get_process_group_ranks(group)), 0
        for each in call.f_locals.values():
            several = each if isinstance(each, list) else [each]
            nbytes += sum(one.nbytes for one in several if isinstance(one, torch.Tensor))
        transfer = nbytes * len(members) / _SLOW_NETWORK
        seconds = time.monotonic() - self._still[1] - transfer
        what = f"torch's {call.f_code.co_name}"
        return Wait(what, str(group.group_desc), 0, seconds, members) if seconds > 0 else None

    def locate(self, coordinates: str) -> None:
        """Tell this rank's place in the mesh."""
        self._here = f"rank {self._rank} ({coordinates})"
        self._store.set(f"here/{self._rank}", self._here)

    def tell(self, topic: str, text: str) -> None:
        """Leave a word for other ranks, who may ask how far this one is (`told`)."""
        with contextlib.suppress(RuntimeError):  # without the store nobody is there to read it
            self._store.set(f"told/{topic}/{self._rank}", text)

    def told(self, topic: str, ranks: Iterable[int]) -> dict[int, str]:
        """What ranks have left on a topic; those that have left nothing are not in it."""
        with contextlib.suppress(RuntimeError):
            keys = {rank: f"told/{topic}/{rank}" for rank in ranks}
            there = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in there.items()}
        return {}

    def close(self, why: str = FINISHED) -> None:
        """Stop; other ranks that still wait for this one are told why it has left."""
        if not self._end.is_set():
            self._end.set()
            self._wake.set()
            # Without the store nobody is there to read it.
            with contextlib.suppress(RuntimeError):
                if self._store_answers():
                    self._store.set(f"left/{self._rank}", why)
                    if why != FINISHED:  # others need not wait until this process has ended
                        self._publish("lost", f"{self._here} is gone: {why}")
                if self._rank == 0 and self.lost is not None and not self._on_one_host:
                    # This process serves the store, where other hosts have yet to read who is gone.
                    time.sleep(2 * self._pause)

    def join(self) -> None:
        """Wait until no thread is in the store any more, if it answers."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def _at_exit(self) -> None:
        """No thread may use the store any more, and none may hold up a process that has failed."""
        error = getattr(sys, "last_value", None)
        self.close(f"it ended with {type(error).__name__}: {error}" if error else FINISHED)
        self.join()
        if error is not None and self.lost is not None:
            # Lanes still wait in gloo, and Python's end of such threads ends in std::terminate.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def gives_up(self, patience: float = 3.0) -> str | None:
        """Which rank is gone, once waits that are still going on cannot end any more."""
        long_ago = time.monotonic() - self._lost_since > patience
        return self.lost if long_ago else None

    def cause(self, ranks: Iterable[int], patience: float = 3.0) -> str | None:
        """Why a collective of `ranks` has failed: one is gone, or has left in order; else None.

        This waits up to `patience` seconds for the news of it.
        """
        begun = self._failed_at = time.monotonic()
        self._suspects = tuple(one for one in ranks if one != self._rank)
        while self.lost is None and not self._end.is_set():
            self._wake.set()
            # Nothing is known of another host before it has been silent for a while.
            news = patience + (0.0 if self._on_one_host else _SILENCE_AFTER_FAILURE + _BEAT)
            if time.monotonic() - begun > news and self._store_answers():
                break
            time.sleep(0.05)
        self._suspects = ()
        return self.lost

    # -- the thread ---------------------------------------------------------------------------

    def _watch(self) -> None:
        """The only thread that asks the store while nothing is lost."""
        while True:
            self._wake.wait(self._pause)
            self._wake.clear()
            if self._end.is_set():
                return
            self._asking_since = time.monotonic()
            try:
                self._look_around()
                self._look_at_suspects()
                self._look_at_next_host()
                self._look_at_waits()
            except RuntimeError as error:
                if not self._end.is_set():
                    self._lose_store(str(error))
                    self._end.wait(self._pause)
            self._asking_since = None

    def _guard(self) -> None:
        """The thread that never asks the store."""
        while not self._end.wait(min(1.0, self._pause)):
            if not self._store_answers():
                self._lose_store(f"silent for {self._silence:.0f} s: it is down, or a link is cut")
            if self.lost is not None:
                self._end_if_stuck(self.lost)

    @property
    def _silence(self) -> float:
        """Seconds after which a host, or the store, is lost. See Note [A host that is silent]."""
        failed = time.monotonic() - self._failed_at < 2 * self._longest_silence
        return _SILENCE_AFTER_FAILURE if failed else self._longest_silence

    @property
    def _on_one_host(self) -> bool:
        return len(self._on_host) == self._world_size

    def _store_answers(self) -> bool:
        """Whether the store has answered, or still may: no link is between ranks of one host."""
        since = self._asking_since
        late = since is not None and time.monotonic() - since > self._silence
        return self._on_one_host or not late

    def _look_around(self) -> None:
        """Processes of this host, and news of others."""
        if not self._on_one_host:
            for number in range(
                len(self._on_host) + 1, self._store.add(f"{self._host}/count", 0) + 1
            ):
                if self._store.check([f"{self._host}/{number}"]):
                    rank, process, started = json.loads(self._store.get(f"{self._host}/{number}"))
                    self._on_host[rank] = process, started
        for rank, (process, started) in list(self._on_host.items()):
            found = _state_of(process)
            if found is None or found[1] != started or found[0] in "ZX":
                self._on_host[rank] = -1, ""
                news = process > 0 and rank != self._rank and self.lost is None
                if news and self._left(rank) != FINISHED:
                    self._lose(rank, f" (process {process} on {socket.gethostname()})")
        while self._store.check([f"news/{self._news + 1}"]):
            self._news += 1
            kind, text = json.loads(self._store.get(f"news/{self._news}"))
            if kind == "alarm":
                self._answer(self._news)
                continue
            if kind == "failed":
                self._failed_at = time.monotonic()
                continue
            self._answered.clear()
            if kind == "verdict":  # it speaks of this rank's wait too
                self._next_alarm = max(self._next_alarm, 2 * self._longest_wait())
            if kind == "lost" and self.lost is None:
                self._lost_since, self.lost = time.monotonic(), text

    def _lose(self, rank: int, process: str = "") -> None:
        """A rank of this host, or of a group that failed, is gone."""
        here = self._text(f"here/{rank}") or f"rank {rank}"
        left = self._left(rank)
        why = left or "killed, or it crashed; see its log"
        self._lost_since, self.lost = time.monotonic(), f"{here}{process} is gone: {why}"
        if not left:
            self._publish("lost", self.lost)

    def _left(self, rank: int) -> str:
        """What a rank has said when it left; nothing if it did not."""
        return self._text(f"left/{rank}")

    def _lose_store(self, why: str) -> None:
        if self.lost is None:
            if 0 in self._on_host and _state_of(self._on_host[0][0]) is None:
                why = f"rank 0 is gone, with the store that it served ({why})"
            where = f" at rank 0 on host {self._server}" * bool(self._server)
            self._lost_since = time.monotonic()
            self.lost = f"the store{where} that the ranks met at cannot be reached: {why}"

    def _look_at_suspects(self) -> None:
        """Of a collective that fails: a rank that has left, or else a word to the other hosts."""
        for one in self._suspects if self.lost is None else ():
            if self._left(one):
                self._lose(one)
                return
        hint = f"failed/{time.time() // 60:.0f}"
        if self._suspects and not self._on_one_host and self._store.add(hint, 1) == 1:
            self._publish("failed", self._here)  # once for all ranks

    def _look_at_next_host(self) -> None:
        """Count for this host, and see that the next one does. See Note [A host that is silent]."""
        now = time.monotonic()
        if now < self._next_beat or self._on_one_host or self.lost is not None:
            return
        self._next_beat = now + _BEAT
        self._store.add(f"{self._host}/beat", 1)
        self._server = self._server or self._text("server")
        after = self._host_number % self._store.add("hosts", 0) + 1
        if self._host_number in (0, after) or not (entry := self._text(f"hosts/{after}")):
            return
        host, name = json.loads(entry)
        beat, silent = (after, self._store.add(f"{host}/beat", 0)), now - self._heard[1]
        if beat != self._heard[0]:
            self._heard = beat, now
        elif silent > self._silence:
            numbers = range(1, self._store.add(f"{host}/count", 0) + 1)
            ranks = [json.loads(self._store.get(f"{host}/{number}"))[0] for number in numbers]
            if not any(map(self._left, ranks)):
                those = f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, sorted(ranks)))}"
                why = f"silent for {silent:.0f} s: it is down, or its link is cut"
                self._publish("lost", f"host {name} ({those}) is {why}")

    def _text(self, key: str) -> str:
        """What the store has under a key; nothing if it has not got it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _publish(self, kind: str, text: str) -> None:
        number = self._store.add("news", 1)
        self._store.set(f"news/{number}", json.dumps([kind, text]))

    def _end_if_stuck(self, lost: str) -> None:
        """End this process if its main thread has waited all along for somebody who is gone.

        Waits of Lamina's raise by themselves. What is left are waits in code of others: the store's
        while a group is made, torch's own collectives.
        """
        frame, now = self._look_at_main(), time.monotonic()
        inside = frame is not None and frame.f_code.co_filename.startswith(_FOREIGN)
        if inside and now - max(self._still[1], self._lost_since) > _PATIENCE:
            finish, self.before_end = self.before_end, None
            if finish is not None:
                # A rank that has raised finishes its save before its groups end, and so long others
                # may wait for it. The save needs them all, and the wait may end with it: soon, if
                # there was nothing to save.
                finish()
                quick = time.monotonic() - now < 1.0
                self._lost_since = time.monotonic() - (_PATIENCE - _ENDS_WITHIN) * quick
                return
            stack = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
            text = f"{self._here} ends, as it still waits: {lost}\n{stack}"
            print(text, file=sys.stderr, flush=True)
            os._exit(EXIT_STATUS)

    # -- waits that last ----------------------------------------------------------------------

    def _look_at_waits(self) -> None:
        longest = self._longest_wait()
        if longest < self._soft_limit:
            self._next_alarm = self._soft_limit
        elif longest > self._next_alarm and not self._answered and self.lost is None:
            self._next_alarm = 2 * longest
            self._publish("alarm", self._here)
        for alarm, since in self._answered.items():
            # The first rank speaks. If it does not, the next one does after a while.
            late = time.monotonic() - since > _ANSWERS_WITHIN * (1 + self._rank)
            if late or (self._rank == 0 and self._store.check(self._reports(alarm))):
                self._conclude(alarm)
                return

    def _longest_wait(self) -> float:
        return max((wait.seconds for wait in self._activity().waits), default=0.0)

    def _reports(self, alarm: int) -> list[str]:
        return [f"report/{alarm}/{rank}" for rank in range(self._world_size)]

    def _answer(self, alarm: int) -> None:
        activity = self._activity()
        frame = sys._current_frames().get(self._main or 0)
        stack = [] if frame is None else traceback.extract_stack(frame)
        own = [one for one in stack if not one.filename.startswith(_FOREIGN)] or stack
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "?"
        text = traceback.format_list(stack)
        report = Report(
            self._here, at, activity.idle, tuple(activity.waits), tuple(activity.recent), text
        )
        self._store.set(f"report/{alarm}/{self._rank}", json.dumps(asdict(report)))
        self._answered[alarm] = time.monotonic()

    def _conclude(self, alarm: int) -> None:
        """Put the reports of all ranks into words, on the terminal and in a file."""
        reports: dict[int, Report | None] = {}
        for rank, key in enumerate(self._reports(alarm)):
            there = self._store.check([key])
            reports[rank] = Report.read(self._store.get(key)) if there else None
        states = {
            rank: found[0]
            for rank, (process, _) in self._on_host.items()
            if (found := _state_of(process)) is not None
        }
        told = verdict(reports, states)
        words = told.words
        path = self._directory / f"lamina-verdict-{os.getpid()}-{alarm}.txt"
        try:
            path.write_text(f"{words}\n\n{told.details}")
            words += f"\nStacks and last collectives of all ranks: {path}"
        except OSError as error:
            words += f"\n(no file with the stacks: {error})"
        print(words, file=sys.stderr, flush=True)
        self._answered.clear()
        self._publish("lost" if told.hopeless else "verdict", words)


def _state_of(process: int) -> tuple[str, str] | None:
    """State (R, S, T, Z, ...) and start time of a process of this host; None if there is none."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return words[0], words[19]


def _host_name() -> str:
    """Equal for processes that see each other under /proc; of its own for any other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:
        return f"{socket.gethostname()}/{os.getpid()}"
