"""The page docs/border.md: a table per chapter, a row per use, a column per wrapper."""

from __future__ import annotations

import datetime
import subprocess
from collections.abc import Mapping

import torch
from border.case import COLUMNS
from border.judge import Use
from border.session import Answer, Cell

_TITLES = {
    "ddp": "DDP",
    "ddp_sharded": "DDP, ZeRO-1",
    "fsdp2": "torch FSDP2",
    "torch_ddp": "torch DDP",
}
_INTRODUCTION = """# The border

What users do with a model, its parameters and its optimizer, under every wrapper, on two ranks
over gloo. Each cell is judged against the same use in one process of plain fp32 PyTorch: gradients,
and parameters after several steps. Made by `python tests/border/page.py`; don't edit.

- **right**: the same within rounding (1e-3 of a tensor's norm in fp32, 6e-2 in bf16).
- **refused**: an error at that moment (or a warning), whose first two lines name the value and the
  remedy.
- **different**: something else, without a word. **crash**: an obscure error, a hang, a death.
- **error**, in torch's own columns: an exception of any kind.

A cell says what holds in fp32 and bf16; "a / b" is fp32 / bf16 where they differ. What is different
or crashes is listed with its reason in `tests/border/known.py`. Wrong uses have no right answer:
there *refused* is the only good one.

Reads of released weights are refused through functions that torch has from 2.14 on (in builds with
CUDA from 2.13 on). On an older torch nothing official keeps such a read from ending the process:
there Lamina sets torch's flag where it lies in the storage (decision 0414).
"""


def page(uses: Mapping[str, Use], found: Mapping[Cell, Answer]) -> str:
    """The whole page, of one run."""
    text = f"Commit {_now()}, torch {torch.__version__}, {len(uses)} uses, {len(found)} cells.\n"
    return _page(text, uses, found)


def page_with(old: str, uses: Mapping[str, Use], found: Mapping[Cell, Answer]) -> str:
    """An older page with the cells of some uses that were run again.

    Args:
        old: the page, whose rows say what every other cell was.
        uses: all uses.
        found: the new answers.
    """
    rows = dict(line[2:-2].split(" | ", 1) for line in old.splitlines() if line.startswith("| "))
    titles: list[str] = []
    answers: dict[Cell, Answer] = {}
    for use in uses.values():
        if use.text not in rows:
            continue  # it is new
        at = old.index(f"| {use.text} |")
        titles = old[old.rindex("| use | ", 0, at) :].splitlines()[0][8:-2].split(" | ")
        for title, text in zip(titles, rows[use.text].split(" | "), strict=True):
            column = next(c for c in COLUMNS if _title(c) == title)
            verdicts = text.replace("*", "").split(" / ")
            for cell, verdict in zip(use.cells((column,)), verdicts + verdicts[-1:], strict=False):
                answers[cell] = Answer(verdict.strip(), "")
    names = ", ".join(f"`{name}`" for name in dict.fromkeys(name for name, *_ in found))
    begin, end = old.index("Commit `"), old.index("| wrapper |")
    text = f"{old[begin:end].strip()}\nRun since then at {_now()}: {names}.\n"
    return _page(text, uses, {**answers, **found})


def _now() -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"`{commit}`, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"


def _page(dated: str, uses: Mapping[str, Use], found: Mapping[Cell, Answer]) -> str:
    parts = [_INTRODUCTION, dated, _counts(found)]
    for chapter in dict.fromkeys(use.chapter for use in uses.values()):
        of_chapter = [use for use in uses.values() if use.chapter == chapter]
        parts += [f"\n## {chapter}\n", _table(of_chapter, found)]
    return "\n".join(parts) + "\n"


def _counts(found: Mapping[Cell, Answer]) -> str:
    kinds = ("right", "refused", "different", "crash", "error")
    lines = [f"| wrapper | {' | '.join(kinds)} |", "| --- | --- | --- | --- | --- | --- |"]
    for column in COLUMNS:
        verdicts = [answer.verdict for cell, answer in found.items() if cell[1] == column]
        counts = " | ".join(str(verdicts.count(kind)) for kind in kinds)
        lines.append(f"| {_title(column)} | {counts} |")
    return "\n".join(lines)


def _table(uses: list[Use], found: Mapping[Cell, Answer]) -> str:
    columns = [c for c in COLUMNS if any(cell[1] == c for u in uses for cell in u.cells((c,)))]
    lines = [
        f"| use | {' | '.join(map(_title, columns))} |",
        f"| --- |{' --- |' * len(columns)}",
    ]
    for use in uses:
        row = " | ".join(_cell(use, column, found) for column in columns)
        lines.append(f"| {use.text} | {row} |")
    return "\n".join(lines)


def _cell(use: Use, column: str, found: Mapping[Cell, Answer]) -> str:
    cells = (cell for cell in use.cells((column,)) if cell in found)
    verdicts = list(dict.fromkeys(found[cell].verdict for cell in cells))
    return " / ".join(v if v in ("right", "refused") else f"**{v}**" for v in verdicts)


def _title(column: str) -> str:
    return _TITLES.get(column, f"strategy {column}" if column.isdigit() else f"`{column}`")
