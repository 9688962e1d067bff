"""The report of a run: Markdown for people, JSON for the record, both whole after every step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.hardware.plan import Step
from tasks.hardware.running import Outcome


@dataclass
class Report:
    """What is known so far; `write` may be called at any time.

    Args:
        title: the first line.
        folder: where `report.md` and `report.json` go.
        machine: what ran it: words by name, such as GPU, torch, commit and date.
        plan: all steps, so that a partial report shows what is still to come.
        before: the record of earlier runs: name of a step -> its last outcome as JSON.
    """

    title: str
    folder: Path
    machine: Mapping[str, str]
    plan: Sequence[Step]
    before: Mapping[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    def write(self) -> None:
        """Write both files, each by a rename, so that a reader never sees half of one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = {"title": self.title, "machine": dict(self.machine)}
        steps = [outcome.as_json() for outcome in self.outcomes]
        waiting = [step.name for step in self.plan[len(self.outcomes) :]]
        record = json.dumps({**facts, "steps": steps, "waiting": waiting}, indent=1)
        for name, text in (("report.json", record), ("report.md", "\n".join(self.markdown()))):
            part = self.folder / f"{name}.part"
            part.write_text(text + "\n")
            part.replace(self.folder / name)

    def markdown(self) -> Iterator[str]:
        """Yield the lines of the page: the machine, what is new, all steps, then their outputs."""
        yield f"# {self.title}\n"
        yield from (f"- {name}: {words}" for name, words in self.machine.items())
        yield f"\n{self.summary()}\n\n## What is new\n"
        yield from self.news()
        yield "\n## Steps\n"
        rows = [
            [o.step.part, o.step.name, o.state, f"{o.seconds:.0f} s", counts(o.tests), o.reason]
            for o in self.outcomes
        ]
        later = self.plan[len(self.outcomes) :]
        rows += [[step.part, step.name, "waits", "", "", ""] for step in later]
        yield from table(["part", "step", "state", "time", "tests", "reason"], rows)
        for outcome in self.outcomes:
            if outcome.lines and (outcome.step.figures or outcome.state != "passed"):
                yield f"\n## {outcome.step.name}: {outcome.state}\n\n`{outcome.step.run}`\n"
                yield from fenced(outcome.lines)

    def summary(self) -> str:
        """Return how many steps ended in which way."""
        found = Counter(outcome.state for outcome in self.outcomes)
        words = [f"{number} {state}" for state, number in found.items()]
        waiting = len(self.plan) - len(self.outcomes)
        return ", ".join([*words, *([f"{waiting} wait"] if waiting else [])]) + "."

    def news(self) -> Iterator[str]:
        """Yield a table of the steps whose state is another than in the record."""
        rows = []
        for outcome in self.outcomes:
            last = self.before.get(outcome.step.name)
            was = f"{last['state']} ({last['commit']}, {last['date']})" if last else "never run"
            if outcome.state != "left out" and (last is None or last["state"] != outcome.state):
                rows.append([outcome.step.name, was, outcome.state, outcome.reason])
        if rows:
            yield from table(["step", "before", "now", "reason"], rows)
        else:
            yield "Nothing: every step that ran ended as the record says."

    def record(self) -> dict[str, Any]:
        """Return the record of earlier runs with this one put in."""
        facts = {key: self.machine.get(key, "") for key in ("commit", "date", "GPU", "torch")}
        ran = [outcome for outcome in self.outcomes if outcome.state != "left out"]
        kept = ("state", "seconds", "reason", "tests")
        new = {o.step.name: {**{k: o.as_json()[k] for k in kept}, **facts} for o in ran}
        return {**self.before, **new}


def counts(tests: Mapping[str, int]) -> str:
    """Return numbers of tests in words."""
    return ", ".join(f"{number} {kind}" for kind, number in tests.items())


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table in Markdown."""
    yield f"| {' | '.join(heads)} |"
    yield f"|{' --- |' * len(heads)}"
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"


def fenced(lines: Iterable[str]) -> Iterator[str]:
    """Yield output as Markdown: its own tables as they are, everything else as text."""
    inside = False
    for line in lines:
        is_row = line.startswith("| ")
        if is_row == inside:  # a table ends the block of text, and text begins one
            yield "```\n" if inside else "\n```text"
            inside = not inside
        yield line
    if inside:
        yield "```"
