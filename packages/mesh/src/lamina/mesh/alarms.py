"""Alarms: all ranks report on a wait that lasts, and one of them puts the reports into words."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lamina.mesh.own_waits import OwnWaits
from lamina.mesh.verdict import Report, Verdict, verdict

__all__ = ["Alarms"]

_ANSWERS_WITHIN = 4.0


class Alarms:
    """When this rank sounds an alarm, what it answers to one, and who concludes.

    A wait is told of after `soft_limit` seconds; verdicts are written to `directory`, or among
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
        told = tuple(activity.waits), tuple(activity.recent)
        report = Report(here, at, activity.idle, *told, stack)
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
        found = verdict(reports, states)
        path = self._directory / f"lamina-verdict-{os.getpid()}-{alarm}.txt"
        try:
            path.write_text(f"{found.words}\n\n{found.details}")
            where = f"Stacks and last collectives of all ranks: {path}"
        except OSError as error:
            where = f"(no file with the stacks: {error})"
        self._answered.clear()
        words = f"{found.words}\n{where}"
        print(words, file=sys.stderr, flush=True)
        return Verdict(words, found.details, found.hopeless)

    def _key(self, alarm: int, rank: int) -> str:
        return f"report/{alarm}/{rank}"
