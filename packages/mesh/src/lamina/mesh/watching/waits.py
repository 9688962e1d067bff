"""Who waits for whom: what this rank waits for, and what all ranks together say of a long wait.

A rank waits in Lamina's collectives, in torch's own, or while a group is made. All ranks report on
a wait that lasts, and one rank speaks for all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

_ANSWERS_WITHIN = 4.0
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
# A mode of the user's that torch calls on the way, such as one that sets a default device.
_MODES = ("__torch_function__", "__torch_dispatch__")


def _is_foreign(file: str, function: str) -> bool:
    """Whether a frame is not the user's program: of Lamina, of torch, or a mode under torch."""
    return file.startswith(_FOREIGN) or function in _MODES


@dataclass(frozen=True)
class Wait:
    """A collective that has begun on a rank and not ended there.

    Attributes:
        what: its operation, and the unit or bucket it is for.
        group: the group's description, such as "dp_shard:gather".
        number: how many collectives this rank has begun in that group, this one included; 0 while
            the group is made.
        seconds: since when it waits.
        ranks: the group's members.
    """

    what: str
    group: str
    number: int
    seconds: float
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        which = f"collective {self.number} of " if self.number else ""
        return f"{self.what} ({which}{self.group})"


@dataclass(frozen=True)
class Activity:
    """What a rank does in collectives: those that have not ended, and the last ones in words."""

    waits: Sequence[Wait] = ()
    recent: Sequence[str] = ()
    idle: float = 0.0
    """Seconds since the last collective was issued."""


class OwnWaits:
    """Knows what this rank waits for. `source` says what it does in Lamina's collectives."""

    def __init__(self) -> None:
        self.source: Callable[[], Activity] = Activity
        self._making: tuple[str, tuple[int, ...], float] | None = None
        self._main = threading.main_thread().ident
        self._spot: tuple[object, float] = (None, 0.0)

    @contextlib.contextmanager
    def making(self, group: str, ranks: tuple[int, ...]) -> Iterator[None]:
        """The body makes a process group, and waits for its members."""
        self._making = group, ranks, time.monotonic()
        try:
            yield
        finally:
            self._making = None

    def activity(self) -> Activity:
        """What this rank does in collectives, the making of a group and torch's own included."""
        activity, now = self.source(), time.monotonic()
        if (making := self._making) is not None:
            group, ranks, since = making
            wait: Wait | None = Wait("the making of a group", group, 0, now - since, ranks)
        else:
            wait = None if activity.waits else self.in_torch()
        return activity if wait is None else replace(activity, waits=[wait, *activity.waits])

    def longest(self) -> float:
        """Seconds of the longest wait."""
        return max((wait.seconds for wait in self.activity().waits), default=0.0)

    def main_thread(self) -> tuple[FrameType | None, float]:
        """Where the main thread is, and since when it was seen there at each look."""
        # At the same instruction of the same frame at two looks, it is taken not to have moved.
        frame = sys._current_frames().get(self._main or 0)
        spot = None if frame is None else (id(frame), frame.f_lasti)
        if spot != self._spot[0]:
            self._spot = spot, time.monotonic()
        return frame, self._spot[1]

    def stuck_since(self) -> tuple[FrameType, float] | None:
        """Where the main thread is in code of others, and since when; None where it is not."""
        frame, since = self.main_thread()
        inside = frame is not None and _is_foreign(frame.f_code.co_filename, frame.f_code.co_name)
        return (frame, since) if frame is not None and inside else None

    def program_line(self) -> tuple[str, list[str]]:
        """The line of the user's program that the main thread has come to, and its stack."""
        frame, _ = self.main_thread()
        stack = [] if frame is None else traceback.extract_stack(frame)
        own = [line for line in stack if not _is_foreign(line.filename, line.name)] or stack
        at = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}" if own else "?"
        return at, traceback.format_list(stack)

    def in_torch(self) -> Wait | None:
        """The collective of torch's own that the main thread waits in, where that is to be seen.

        Torch tells nobody of these, but its function stands on the stack, with its group and its
        tensors. A wait for a handle (`work.wait()`) has no such function.

        Note [Who has left a broadcast]
        The source of a broadcast may have gone on while others still receive. So a wait counts
        from when the bytes would have come on a slow network.
        """
        (frame, since), call = self.main_thread(), None
        while frame is not None and _is_foreign(frame.f_code.co_filename, frame.f_code.co_name):
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
            values = each if isinstance(each, list) else [each]
            nbytes += sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
        transfer = nbytes * len(members) / _SLOW_NETWORK
        seconds = time.monotonic() - since - transfer
        what = f"torch's {call.f_code.co_name}"
        return Wait(what, str(group.group_desc), 0, seconds, members) if seconds > 0 else None


@dataclass(frozen=True)
class Report:
    """What one rank does.

    Attributes:
        here: the rank and its place in the mesh.
        at: the line of the user's program that its main thread has come to.
        idle: seconds since it issued a collective.
        waits: what it waits for, the oldest first.
        recent: its last collectives in words.
        stack: its main thread's Python stack, a line each.
    """

    here: str
    at: str
    idle: float
    waits: tuple[Wait, ...]
    recent: tuple[str, ...]
    stack: Sequence[str]

    @staticmethod
    def read(text: bytes) -> Report:
        """A report that was sent as JSON."""
        fields = json.loads(text)
        waits = [Wait(**{**wait, "ranks": tuple(wait["ranks"])}) for wait in fields.pop("waits")]
        return Report(waits=tuple(waits), **fields)


@dataclass(frozen=True)
class Verdict:
    """Who holds everybody up, and who waits.

    In a sentence or two (`words`), with what every rank has reported (`details`). It is `hopeless`
    if all ranks wait, each in a collective to which some member does not come, and none waits so
    little that it may just go on.
    """

    words: str
    details: str
    hopeless: bool


def verdict(reports: Mapping[int, Report | None], states: Mapping[int, str]) -> Verdict:
    """Put reports together.

    Ranks that did not answer have None. `states` is what /proc says of the processes that it shows
    ("T" is stopped).
    """
    # Ranks that wait in the same collective of the same group are one sentence.
    waiting: dict[tuple[str, str, int], dict[int, Report]] = {}
    held_up: list[str] = []
    for rank, report in reports.items():
        if report is None:
            state = "its process is stopped" if states.get(rank) in ("T", "t") else "no answer"
            held_up.append(f"rank {rank} does not run ({state})")
        elif report.waits:
            wait = report.waits[0]
            waiting.setdefault((wait.what, wait.group, wait.number), {})[rank] = report
        else:
            held_up.append(
                f"{report.here} is in none of Lamina's collectives for {report.idle:.0f} s: it is "
                f"at {report.at}"
            )
    said, complete = [], False
    for there in waiting.values():
        ranks = list(there)
        report = there[ranks[0]]
        wait, several = report.waits[0], len(ranks) > 1
        who = f"{len(ranks)} ranks ({_ranges(ranks)}) wait" if several else f"{report.here} waits"
        at = f" (rank {ranks[0]} at {report.at})" if several else f" (at {report.at})"
        missing = sorted(set(wait.ranks) - set(ranks))
        complete = complete or not missing
        absent = f", to which rank{'s'[: len(missing) > 1]} {_ranges(missing)} did not come"
        said.append(f"{who} for {wait.seconds:.0f} s in {wait}{at}{absent if missing else ''}")
    # Only where all have waited about as long: a rank that has just come may go on.
    seconds = [report.waits[0].seconds for report in reports.values() if report and report.waits]
    settled = bool(seconds) and 4 * min(seconds) >= max(seconds)
    hopeless = not held_up and not complete and settled
    if hopeless:
        said.append(
            "every rank waits, and not in the same collective: ranks make different calls. Look "
            "for a call inside `if rank == 0`, and for a loop that is longer on some ranks. It may "
            "stand before these lines: a forward on one rank pairs with the next one of others"
        )
    details = "\n".join(_details(rank, report) for rank, report in reports.items())
    words = "The job does not go on: " + "; ".join([*held_up, *said]) + "."
    return Verdict(words, details, hopeless)


def _details(rank: int, report: Report | None) -> str:
    if report is None:
        return f"== rank {rank}: no report"
    waits = [f"  waits for {wait.seconds:.1f} s: {wait}" for wait in report.waits]
    last = [f"  did: {text}" for text in report.recent]
    return "\n".join([f"== {report.here} at {report.at}", *waits, *last, "".join(report.stack)])


def _ranges(ranks: Sequence[int]) -> str:
    """0, 1, 2, 5 as "0-2, 5"."""
    runs = []
    # Within a run, ranks and their places in the sequence grow alike.
    for _, run in groupby(enumerate(ranks), lambda at: at[1] - at[0]):
        first, *others = (rank for _, rank in run)
        runs.append(f"{first}-{others[-1]}" if others else str(first))
    return ", ".join(runs)


class Alarms:
    """When this rank sounds an alarm, what it answers to one, and who concludes.

    A wait is reported after `soft_limit` seconds; verdicts are written to `directory`, or among
    temporary files. `waits` are this rank's own, number `rank` of `world_size`.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        soft_limit: float,
        directory: str | os.PathLike[str] | None,
        waits: OwnWaits,
    ) -> None:
        self._store, self._rank, self._waits = store, rank, waits
        self._everyone = range(world_size)
        self._soft_limit = self._next = soft_limit
        self._directory = Path(tempfile.gettempdir() if directory is None else directory)
        self._answered: dict[int, float] = {}  # alarms without a verdict, and since when

    def due(self) -> bool:
        """Whether this rank waits for so long that an alarm is to be sounded."""
        longest = self._waits.longest()
        if longest < self._soft_limit:
            self._next = self._soft_limit
        due = longest > self._next and not self._answered
        if due:
            self._next = 2 * longest
        return due

    def answer(self, alarm: int, here: str) -> None:
        """Report, as rank `here`, what this rank does."""
        activity, (at, stack) = self._waits.activity(), self._waits.program_line()
        waits, recent = tuple(activity.waits), tuple(activity.recent)
        report = Report(here, at, activity.idle, waits, recent, stack)
        self._store.set(self._key(alarm, self._rank), json.dumps(asdict(report)))
        self._answered[alarm] = time.monotonic()

    def answered(self, spoken: bool) -> None:
        """Somebody has concluded, and perhaps `spoken` of this rank's wait too."""
        self._answered.clear()
        if spoken:
            self._next = max(self._next, 2 * self._waits.longest())

    def to_conclude(self) -> int | None:
        """An alarm that this rank has to put into words; None where there is none."""
        for alarm, since in self._answered.items():
            # The first rank speaks. If it does not, the next one does after a while.
            late = time.monotonic() - since > _ANSWERS_WITHIN * (1 + self._rank)
            reports = [self._key(alarm, rank) for rank in self._everyone]
            if late or (self._rank == 0 and self._store.check(reports)):
                return alarm
        return None

    def conclude(self, alarm: int, states: Mapping[int, str]) -> Verdict:
        """Put the reports of all ranks into words, on the terminal and in a file.

        `states` are those of this host's processes.
        """
        reports: dict[int, Report | None] = {}
        for rank in self._everyone:
            key = self._key(alarm, rank)
            there = self._store.check([key])
            reports[rank] = Report.read(self._store.get(key)) if there else None
        spoken = verdict(reports, states)
        # Stacks of all ranks would flood the terminal.
        path = self._directory / f"lamina-verdict-{os.getpid()}-{alarm}.txt"
        try:
            path.write_text(f"{spoken.words}\n\n{spoken.details}")
            where = f"Stacks and last collectives of all ranks: {path}"
        except OSError as error:
            where = f"(no file with the stacks: {error})"
        self._answered.clear()
        spoken = replace(spoken, words=f"{spoken.words}\n{where}")
        print(spoken.words, file=sys.stderr, flush=True)
        return spoken

    def _key(self, alarm: int, rank: int) -> str:
        return f"report/{alarm}/{rank}"
