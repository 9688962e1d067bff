"""The table of docs/records/elsewhere.md: the last trial with each Python and torch."""

from __future__ import annotations

import datetime
from typing import NamedTuple

from tasks.bootstrap import ROOT

RECORD = ROOT / "docs" / "records" / "elsewhere.md"
HEAD = """# Elsewhere

`python3 noxfile.py -s elsewhere` tries README's two commands and two of its installs on another
kind of machine: in a clone called "a clone of lamina", without git's data, as another user, who has
an empty home and umask 077, with `LC_ALL=C` and no variables but `PATH`, `TMPDIR`, the user's name
and where pip finds packages. The first run has 20 steps, and a second one goes on from there.
A row is the last trial of that Python and torch.

| Python | torch | date | commit | the tests | the first run, its resume, the installs |
| --- | --- | --- | --- | --- | --- |
"""


class Row(NamedTuple):
    """A trial: with what, of which commit, pytest's closing line, and what failed."""

    python: str
    torch: str
    commit: str
    tests: str
    others: str

    def cells(self) -> list[str]:
        """Return the cells of the table's line."""
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        return [self.python, self.torch, today, self.commit, self.tests, self.others]


def add(row: Row) -> None:
    """Write the trial into the table, in place of the last one with the same Python and torch."""
    rows = {(row.python, row.torch): row.cells()}
    if RECORD.exists():
        for line in RECORD.read_text().partition("| --- |")[2].splitlines()[1:]:
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            # What could not be reached before is superseded by any trial of that version.
            reached = not cells[1] and row.torch and row.python.startswith(f"{cells[0]}.")
            if len(cells) == len(row) + 1 and not reached:
                rows.setdefault((cells[0], cells[1]), cells)

    def order(key: tuple[str, str]) -> list[tuple[int, ...]]:
        return [
            tuple(int(word) for word in text.partition("+")[0].split(".") if word.isdigit())
            for text in key
        ]

    lines = [f"| {' | '.join(rows[key])} |\n" for key in sorted(rows, key=order)]
    RECORD.write_text(HEAD + "".join(lines))
