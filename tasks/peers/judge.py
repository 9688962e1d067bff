"""What a test's two runs, over torch and over Lamina, say together."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.matrix.record import Result

VERDICTS = {
    "holds": "the test passes over Lamina",
    "refused": "Lamina raises an error that says what to do instead",
    "absent": "Lamina has no such name or argument",
    "differs": "Lamina does something else by design, for a reason that docs give",
    "breaks": "none of these: something to repair or to explain",
    "not judged": "the test does not pass over torch itself here, is about torch's internals, or "
    "wraps no model in what Lamina has",
}
REASONS = Path(__file__).with_name("reasons.toml")
ABSENT = re.compile(
    r"AttributeError: .*(has no attribute|no argument)"
    r"|unexpected keyword argument|cannot import name"
)
# `assertRaisesRegex`: the error came, and its message is another.
OTHER_WORDS = re.compile(r'AssertionError: ".*" does not match "')
# The last frame of a traceback: file, line, function; then the line of source.
FRAME = re.compile(r'File "([^"]+)", line \d+, in [^\n]+\n\s*([^\n]*)')
OURS = re.compile(r"/packages/(\w+)/src/lamina/\1/")  # torch too may lie below a "lamina"
LAST = re.compile(r"(?m)^(?:E\s+)?([\w.]*(?:Error|Exception|Refused)\w*): ([^\n]*)")


@dataclass(frozen=True)
class Reason:
    """A line of `reasons.toml`: why tests of that name do not hold, and where docs say so.

    Args:
        tests: a pattern of names, such as `TestFullyShardOverlap::*`.
        verdict: "refused", "absent" or "differs".
        why: in one sentence.
        link: page and anchor in docs/.
    """

    tests: str
    verdict: str
    why: str
    link: str


@dataclass(frozen=True)
class Judgement:
    """What is said of one test: a key of VERDICTS, why, and where docs explain it."""

    test: str
    verdict: str
    why: str = ""
    link: str = ""


def reasons() -> list[Reason]:
    """Read the reasons that were written down."""
    return [Reason(**entry) for entry in tomllib.loads(REASONS.read_text()).get("reason", ())]


def judge(
    test: str,
    torch: Result | None,
    lamina: Result | None,
    known: Sequence[Reason],
    aside: str = "",
) -> Judgement:
    """Judge one test.

    Args:
        test: "Class::name".
        torch: how it ended over torch itself, on this machine; None if it did not run.
        lamina: how it ended over Lamina.
        known: the reasons that were written down.
        aside: why it says nothing about Lamina, if that is known from its text.
    """
    if aside:
        return Judgement(test, "not judged", aside)
    if torch is None or torch.outcome != "passed":
        why = one_line(torch.reason) if torch else "it did not run"
        return Judgement(test, "not judged", f"over torch itself: {why}")
    if lamina is not None and lamina.outcome == "passed":
        return Judgement(test, "holds")
    text = lamina.reason if lamina else "it did not run"
    for reason in known:
        if fnmatch.fnmatch(test, reason.tests):
            return Judgement(test, reason.verdict, reason.why, reason.link)
    if OTHER_WORDS.search(text):
        return Judgement(test, "differs", "it raises as torch does, in words of its own")
    return Judgement(test, found_verdict(text), one_line(text))


def found_verdict(text: str) -> str:
    """Tell from a traceback whether Lamina refused, lacks something, or broke."""
    if ABSENT.search(text):
        return "absent"
    frames = FRAME.findall(text)
    if frames and OURS.search(frames[-1][0]) and frames[-1][1].startswith("raise"):
        return "refused"
    return "breaks"


def one_line(text: str) -> str:
    """Return the error of a traceback, or the last line that says something."""
    if errors := LAST.findall(text):
        name, message = errors[-1]
        return f"{name.rpartition('.')[2]}: {message}"[:200]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def by_verdict(judgements: Sequence[Judgement]) -> Mapping[str, list[Judgement]]:
    """Group judgements, in the order of VERDICTS."""
    return {verdict: [j for j in judgements if j.verdict == verdict] for verdict in VERDICTS}
