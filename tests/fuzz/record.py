"""docs/records/fuzz.md: what was run, and what was said of it."""

from __future__ import annotations

import collections
import datetime
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fuzz.case import Case
from fuzz.judge import GOOD, Verdict

PAGE = Path("docs/records/fuzz.md")
HEAD = """\
# Random programs

`python3 noxfile.py -s fuzz -- --cases N --seed S --keep` writes this page. [Testing](../testing.md#random-programs) says what a case is.

- **right**: the same parameters and gradients as in one process of plain PyTorch. **refused**: an error of Lamina with the remedy, on all ranks.
- **invalid**: plain PyTorch refuses the program too. **theirs**: torch's FSDP2 refuses it under the wrapper over it, or has these numbers without Lamina; or `torch.compile` alone does.
- Everything else is a fault: other numbers, other bits than law 2 promises, a hang, a death, an obscure error, an error on some ranks only.
"""  # noqa: E501


def write_record(
    root: Path, seed: str, verdicts: Sequence[tuple[Case, Verdict]], date: datetime.date
) -> None:
    """Write the page."""
    page = [HEAD, _when(root, seed, len(verdicts), date), "", *_table(verdicts), ""]
    page += ["## What was refused", "", *_refusals(verdicts), ""]
    (root / PAGE).write_text("\n".join(page))


def _when(root: Path, seed: str, count: int, date: datetime.date) -> str:
    words = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return f"Last run: {date}, commit `{commit}`, {count} cases of seed {seed}."


def _table(verdicts: Sequence[tuple[Case, Verdict]]) -> list[str]:
    by_wrapper: dict[str, collections.Counter[str]] = {}
    for case, verdict in verdicts:
        for name in (wrapper_name(case), "all"):
            by_wrapper.setdefault(name, collections.Counter())[verdict.outcome] += 1
    columns = [*GOOD, *sorted({v.outcome for _, v in verdicts} - set(GOOD))]
    lines = [f"| wrapper | {' | '.join(columns)} |", "| --- |" + " --- |" * len(columns)]
    names = [*sorted(set(by_wrapper) - {"all"}), "all"]
    for name in names:
        counts = " | ".join(str(by_wrapper[name][column]) for column in columns)
        lines.append(f"| {name} | {counts} |")
    return lines


def wrapper_name(case: Case) -> str:
    """How the page calls the first wrapper of a case."""
    wrapper = case.wrappers[0]
    name = {"torch": "torch's FSDP2", "ddp": "DistributedDataParallel"}.get(
        wrapper.kind, f"`{wrapper.kind}`"
    )
    strategy = f" {wrapper.strategy}" if wrapper.kind in ("ddp", "fully_shard") else ""
    outer = "" if wrapper.replicas == 1 else ", HFSDP" if wrapper.outer else ", replicas"
    return f"{name}{strategy}{outer}"


def _refusals(verdicts: Sequence[tuple[Case, Verdict]]) -> list[str]:
    words: collections.Counter[str] = collections.Counter()
    for _, verdict in verdicts:
        if verdict.outcome == "refused":
            words[_words(verdict.detail)] += 1
    return [f"- {count}: {text}" for text, count in words.most_common()]


def _words(detail: str) -> str:
    """An error without its numbers and its place."""
    text = re.sub(r" \([^()]*:\d+\)$|\(\w+\.py:.*$", "", detail)
    return re.sub(r"\d+", "N", text)[:160].replace("|", "/").replace("<", "&lt;").strip()
