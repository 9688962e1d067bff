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
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its stubs

from lamina.mesh.watching.host_watch import BEAT, HostWatch, text_of
from lamina.mesh.watching.waits import Activity, Alarms, OwnWaits

EXIT_STATUS = 70
"""Exit status of a rank that waited for one that is gone, until the watchdog ended it."""
FINISHED = "it has finished"
_PATIENCE = 5.0
_ENDS_WITHIN = 2.0
_SILENCE_AFTER_FAILURE = 6.0


def end_process(text: str) -> None:
    """Say why and end the process, whichever thread calls, with all that was printed before."""
    # The process ends in any case: the program may have closed its outputs.
    with contextlib.suppress(Exception):
        print(text, file=sys.stderr, flush=True)
        sys.stdout.flush()
    os._exit(EXIT_STATUS)


class _Silence:
    """For how long nothing may be heard of another host, or of the store.

    See Note [A host that is silent]. `longest` is the limit in seconds where nothing has failed.
    """

    def __init__(self, longest: float) -> None:
        self.longest = longest
        self.failed_at = -math.inf
        """When a transport has failed."""
        self.suspects: tuple[int, ...] = ()
        """Members of the collective that fails."""
        self.asking_since: float | None = None
        """Since when the store is asked, and has not answered."""

    @property
    def limit(self) -> float:
        """Seconds after which a host, or the store, is lost."""
        failed = time.monotonic() - self.failed_at < 2 * self.longest
        return _SILENCE_AFTER_FAILURE if failed else self.longest

    @property
    def broken(self) -> bool:
        """Whether the store has been asked for longer than that."""
        since = self.asking_since
        return since is not None and time.monotonic() - since > self.limit


class Watchdog:
    """Watches over this rank's waits and over the other processes of its host.

    It has its own connection to the `store` where the ranks have met. A wait is reported after
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
        # A connection of its own: a call on the shared one may wait for minutes, with its lock
        # held.
        self._store: Any = cast(Any, store).clone()
        self._rank, self._here = rank, f"rank {rank}"
        # All ranks ask one store, so that the more they are, the more seldom each asks.
        self._pause = max(min(1.0, soft_limit / 4), world_size / 2000)
        self._silence = _Silence(max(10.0, soft_limit / 2, 4 * self._pause))
        self._waits = OwnWaits()
        self._hosts = HostWatch(self._store, rank, world_size)
        self._alarms = Alarms(self._store, rank, world_size, soft_limit, directory, self._waits)
        self._news = 0
        self._lost_since = 0.0
        self._end, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="lamina-watchdog", daemon=True),
            threading.Thread(target=self._guard, name="lamina-watchdog-guard", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)

    def watch(self, source: Callable[[], Activity]) -> None:
        """Ask `source` what this rank does in collectives."""
        self._waits.source = source

    def making(self, group: str, ranks: tuple[int, ...]) -> contextlib.AbstractContextManager[None]:
        """The body makes a process group, and waits for its members."""
        return self._waits.making(group, ranks)

    def locate(self, coordinates: str) -> None:
        """Tell this rank's place in the mesh."""
        self._here = f"rank {self._rank} ({coordinates})"
        self._store.set(f"here/{self._rank}", self._here)

    def say(self, topic: str, text: str) -> None:
        """Leave a word for other ranks, who may ask how far this one is (`said`)."""
        with contextlib.suppress(RuntimeError):  # without the store nobody is there to read it
            self._store.set(f"said/{topic}/{self._rank}", text)

    def said(self, topic: str, ranks: Iterable[int]) -> dict[int, str]:
        """What ranks have left on a topic; those that have left nothing are not in it."""
        with contextlib.suppress(RuntimeError):
            keys = {rank: f"said/{topic}/{rank}" for rank in ranks}
            there = {rank: key for rank, key in keys.items() if self._store.check([key])}
            return {rank: self._store.get(key).decode() for rank, key in there.items()}
        return {}

    def close(self, why: str = FINISHED) -> None:
        """Stop; other ranks that still wait for this one can read why it has left."""
        if not self._end.is_set():
            self._end.set()
            self._wake.set()
            # Without the store nobody is there to read it.
            with contextlib.suppress(RuntimeError):
                if self._store_answers():
                    self._store.set(f"left/{self._rank}", why)
                    if why != FINISHED:  # others need not wait until this process has ended
                        self._publish("lost", f"{self._here} is gone: {why}")
                if self._rank == 0 and self.lost is not None and not self._hosts.alone:
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
        # A wait may still end by itself: what the lost rank sent before may be on its way.
        long_ago = time.monotonic() - self._lost_since > patience
        return self.lost if long_ago else None

    def cause(self, ranks: Iterable[int], patience: float = 3.0) -> str | None:
        """Why a collective of `ranks` has failed: one is gone, or has left in order; else None.

        This waits up to `patience` seconds for the news of it.
        """
        begun = self._silence.failed_at = time.monotonic()
        self._silence.suspects = tuple(member for member in ranks if member != self._rank)
        while self.lost is None and not self._end.is_set():
            self._wake.set()
            # Nothing is known of another host before it has been silent for a while.
            news = patience + (0.0 if self._hosts.alone else _SILENCE_AFTER_FAILURE + BEAT)
            if time.monotonic() - begun > news and self._store_answers():
                break
            time.sleep(0.05)
        self._silence.suspects = ()
        return self.lost

    # -- the two threads ----------------------------------------------------------------------

    def _watch(self) -> None:
        """The only thread that asks the store while nothing is lost."""
        while True:
            self._wake.wait(self._pause)
            self._wake.clear()
            if self._end.is_set():
                return
            # From here on the other thread may find that no answer comes.
            self._silence.asking_since = time.monotonic()
            try:
                self._look_around()
                self._look_at_suspects()
                silent = None if self.lost else self._hosts.silent_host(self._silence.limit)
                if silent is not None:
                    self._publish("lost", silent)
                self._look_at_waits()
            except RuntimeError as error:
                if not self._end.is_set():
                    self._lose_store(str(error))
                    self._end.wait(self._pause)
            self._silence.asking_since = None

    def _guard(self) -> None:
        """The thread that never asks the store."""
        while not self._end.wait(min(1.0, self._pause)):
            if not self._store_answers():
                self._lose_store(
                    f"silent for {self._silence.limit:.0f} s: it is down, or a link is cut"
                )
            if self.lost is not None:
                self._end_if_stuck(self.lost)

    def _store_answers(self) -> bool:
        """Whether the store has answered, or still may: no link is between ranks of one host."""
        return self._hosts.alone or not self._silence.broken

    def _look_around(self) -> None:
        """Processes of this host, and news of others."""
        for rank, process in self._hosts.ended():
            # A rank that has left in order is no loss, and only the first loss is of interest.
            others = rank != self._rank and self.lost is None
            if others and self._left(rank) != FINISHED:
                self._lose(rank, f" (process {process} on {socket.gethostname()})")
        # News are numbered, and each rank reads them in order: all ranks see the same story.
        while self._store.check([f"news/{self._news + 1}"]):
            self._news += 1
            kind, text = json.loads(self._store.get(f"news/{self._news}"))
            if kind == "alarm":
                self._alarms.answer(self._news, self._here)
            elif kind == "failed":
                self._silence.failed_at = time.monotonic()
            else:
                self._alarms.answered(spoken=kind == "verdict")
            if kind == "lost" and self.lost is None:
                self._lost_since, self.lost = time.monotonic(), text

    def _lose(self, rank: int, process: str = "") -> None:
        """A rank of this host, or of a group that failed, is gone."""
        here = text_of(self._store, f"here/{rank}") or f"rank {rank}"
        left = self._left(rank)
        why = left or "killed, or it crashed; see its log"
        self._lost_since, self.lost = time.monotonic(), f"{here}{process} is gone: {why}"
        if not left:
            self._publish("lost", self.lost)

    def _left(self, rank: int) -> str:
        """What a rank has said when it left; nothing if it did not."""
        return text_of(self._store, f"left/{rank}")

    def _lose_store(self, why: str) -> None:
        if self.lost is None:
            if self._hosts.server_is_gone():
                why = f"rank 0 is gone, with the store that it served ({why})"
            where = f" at rank 0 on host {self._hosts.server}" * bool(self._hosts.server)
            self._lost_since = time.monotonic()
            self.lost = f"the store{where} that the ranks met at cannot be reached: {why}"

    def _look_at_suspects(self) -> None:
        """Of a collective that fails: a rank that has left, or else a word to the other hosts."""
        for suspect in self._silence.suspects if self.lost is None else ():
            if self._left(suspect):
                self._lose(suspect)
                return
        hint = f"failed/{time.time() // 60:.0f}"
        if self._silence.suspects and not self._hosts.alone and self._store.add(hint, 1) == 1:
            self._publish("failed", self._here)  # once for all ranks

    def _publish(self, kind: str, text: str) -> None:
        number = self._store.add("news", 1)
        self._store.set(f"news/{number}", json.dumps([kind, text]))

    def _end_if_stuck(self, lost: str) -> None:
        """End this process if its main thread has waited all along for somebody who is gone.

        Waits of Lamina's raise by themselves. What is left are waits in code of others: the store's
        while a group is made, torch's own collectives.
        """
        stuck, now = self._waits.stuck_since(), time.monotonic()
        if stuck is not None and now - max(stuck[1], self._lost_since) > _PATIENCE:
            finish, self.before_end = self.before_end, None
            if finish is not None:
                # A rank that has raised finishes its save before its groups end, and so long others
                # may wait for it. The save needs them all, and the wait may end with it: soon, if
                # there was nothing to save.
                finish()
                quick = time.monotonic() - now < 1.0
                self._lost_since = time.monotonic() - (_PATIENCE - _ENDS_WITHIN) * quick
                return
            stack = "".join(traceback.format_stack(stuck[0])[-3:])
            text = f"{self._here} ends, as it still waits: {lost}\n{stack}"
            end_process(text)

    def _look_at_waits(self) -> None:
        if self.lost is None and self._alarms.due():
            self._publish("alarm", self._here)
        alarm = self._alarms.to_conclude()
        if alarm is not None:
            spoken = self._alarms.conclude(alarm, self._hosts.states())
            self._publish("lost" if spoken.hopeless else "verdict", spoken.words)
