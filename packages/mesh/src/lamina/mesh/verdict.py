"""Who waits for whom: all ranks report on a wait that lasts, and one rank speaks for all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lamina.mesh.own_waits import OwnWaits, Wait

__all__ = ["Alarms", "Report", "Verdict", "verdict"]

_ANSWERS_WITHIN = 4.0


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
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


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
