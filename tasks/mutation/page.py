"""What became of planted faults: verdicts, explanations of survivors, and the record."""

from __future__ import annotations

import json
import time
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.matrix.history import commit_of
from tasks.mutation.mutants import KINDS, Mutant

OUTCOMES = ("died", "lived", "never entered")
EXPLAINED = Path(__file__).with_name("explained.toml")
PAGE = """\
# Faults planted in {layer}

Made by `python3 noxfile.py -s mutate -- {layer} --keep` on {date} at commit `{commit}`; don't edit.
The faults are a random sample (seed {seed}) over the layer. Each is one small change in a copy of
it. Of the tests that reach the block of statements around it, {limit} at most run, until one fails.
A fault is "never entered" if no test reaches its block.
Tests: {tests}. {doubts}

{summary}

| kind | planted | {heads} |
| --- | --- | {dashes} |
{kinds}

## What lives

{alive}
"""


@dataclass(frozen=True)
class Verdict:
    """What became of one fault.

    Args:
        mutant: the fault.
        outcome: one of OUTCOMES.
        by: the test that failed, or how many passed.
        seconds: that the tests took.
    """

    mutant: Mutant
    outcome: str
    by: str
    seconds: float

    @classmethod
    def parse(cls, line: str) -> Verdict:
        """Read what `line` wrote."""
        values = json.loads(line)
        return cls(**{**values, "mutant": Mutant(**values["mutant"])})

    def line(self) -> str:
        """Return the verdict as a line of JSON."""
        return json.dumps(asdict(self))

    def headline(self) -> str:
        """Return the verdict for people."""
        by = f" ({self.by}, {self.seconds:.0f} s)" if self.by else ""
        return f"{self.outcome}: {self.mutant.name}{by}"


@dataclass(frozen=True)
class Conditions:
    """How faults were tried.

    Args:
        tests: paths of the tests.
        seed: that the sample was drawn with.
        limit: tests per fault.
        failed: tests that were left out, as they failed without a fault.
        doubtful: tests that have killed, and failed without a fault afterwards.
    """

    tests: tuple[str, ...]
    seed: int
    limit: int
    failed: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()

    def doubts(self) -> str:
        """Return what is to be known of tests that fail without a fault."""
        left_out = ", ".join(f"`{test}`" for test in self.failed)
        doubtful = ", ".join(f"`{test}`" for test in self.doubtful)
        first = f"Left out, as they fail without a fault: {left_out}. " if left_out else ""
        if doubtful:
            return f"{first}In doubt, as they failed without a fault afterwards: {doubtful}."
        return f"{first}Each test that has killed a fault passed once more without it."


def show(layer: str, verdicts: Sequence[Verdict]) -> str:
    """Return the counts in one sentence."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    share = 100 * counts["died"] / max(1, len(verdicts))
    parts = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    return f"{layer}: of {len(verdicts)} faults {parts} ({share:.0f}% died)"


def explanation(
    layer: str, mutant: Mutant, table: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Return why a survivor is no fault, or no test can show it; "" if nobody has said.

    Explanations name the file, the function and the change, not the line, which moves.
    """
    for entry in table.get(layer, ()):
        place = (entry["file"], entry["function"], entry["before"], entry["after"])
        if place == (mutant.file, mutant.function, mutant.before, mutant.after):
            return entry["why"]
    return ""


def keep(root: Path, layer: str, verdicts: Sequence[Verdict], how: Conditions) -> Path:
    """Write the layer's record; return its path."""
    table = tomllib.loads(EXPLAINED.read_text())
    kinds = []
    for kind in KINDS:
        counts = Counter(v.outcome for v in verdicts if v.mutant.kind == kind)
        numbers = " | ".join(str(counts[outcome]) for outcome in OUTCOMES)
        kinds.append(f"| {kind} | {sum(counts.values())} | {numbers} |")
    alive = []
    for verdict in sorted(verdicts, key=lambda v: v.mutant):
        if verdict.outcome != "died":
            why = explanation(layer, verdict.mutant, table)
            said = f": {why}" if why else ""
            alive.append(f"- `{verdict.mutant.name}` ({verdict.outcome}){said}")
    path = root / "docs" / "records" / "mutation" / f"{layer}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        PAGE.format(
            layer=layer,
            date=time.strftime("%Y-%m-%d"),
            commit=commit_of(root),
            tests=", ".join(f"`{name}`" for name in how.tests),
            seed=how.seed,
            limit=how.limit,
            doubts=how.doubts(),
            summary=show(layer, verdicts),
            heads=" | ".join(OUTCOMES),
            dashes=" | ".join("---" for _ in OUTCOMES),
            kinds="\n".join(kinds),
            alive="\n".join(alive) or "Nothing.",
        )
    )
    return path
