"""What the ranks of a job that does not go on have reported, in words: who waits for whom."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Report", "Verdict", "Wait", "verdict"]


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
        found = json.loads(text)
        waits = tuple(Wait(**{**one, "ranks": tuple(one["ranks"])}) for one in found.pop("waits"))
        return Report(waits=waits, **found)


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
    last = [f"  did: {one}" for one in report.recent]
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
