"""What cells have shown: their tests one by one while they run, and the last run of each.

A cell's files are in `.matrix/cells/NAME/`. They hold for one state of the sources that the cell
tests: a run that was cut off goes on where it ended, and changed sources start it anew. Runs that
are to outlast the machine are kept in `docs/records/cells.json`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.matrix.cells import Cell
from tasks.matrix.record import Result, read_results

OUTCOMES = ("passed", "failed", "skipped")
VIRTUAL = "virtual GPU"  # the machine of a run begins so


@dataclass(frozen=True)
class Run:
    """How one cell ended.

    Args:
        cell: the cell.
        state: hash of the sources that it tested, see `state_of`.
        commit: the commit at hand, with "+" if the tree had other changes.
        date: day, as YYYY-MM-DD.
        seconds: of all its tests.
        counts: outcome -> number of tests.
        machine: cores and GPUs; `VIRTUAL` and in which orders work was done, if there are none.
        versions: of python, torch, triton and transformer_engine.
    """

    cell: Cell
    state: str
    commit: str
    date: str
    seconds: float
    counts: dict[str, int] = field(hash=False)
    machine: str
    versions: dict[str, str] = field(hash=False)

    @property
    def passed(self) -> bool:
        """Whether no test failed."""
        return not self.counts.get("failed")

    @property
    def is_virtual(self) -> bool:
        """Whether its GPUs were virtual ones."""
        return self.machine.startswith(VIRTUAL)

    @property
    def key(self) -> tuple[str, ...]:
        """Return what another run must share to take this one's place in the record."""
        versions = (self.versions.get(name, "") for name in ("triton", "transformer_engine"))
        return (self.cell.name, *versions)

    def summary(self) -> str:
        """Return the counts as pytest words them."""
        words = [f"{self.counts[o]} {o}" for o in OUTCOMES if self.counts.get(o)]
        return ", ".join(words) or "no tests"


@dataclass(frozen=True)
class CellFiles:
    """The files of one cell's last run on this machine."""

    place: Path
    state: str

    @classmethod
    def of(cls, root: Path, name: str, state: str) -> CellFiles:
        """Open the files of that name; those of another state of the sources are removed."""
        files = cls(root / ".matrix" / "cells" / name, state)
        marker = files.place / "state"
        if not marker.exists() or marker.read_text() != state:
            shutil.rmtree(files.place, ignore_errors=True)
            files.place.mkdir(parents=True)
            marker.write_text(state)
        return files

    @property
    def results(self) -> Path:
        """Return the file that pytest adds each test's result to."""
        return self.place / "results.jsonl"

    @property
    def log(self) -> Path:
        """Return the file with pytest's output."""
        return self.place / "log.txt"

    def tests(self) -> list[Result]:
        """Return the last result of every test so far."""
        return list(read_results(self.results).values())

    def counts(self) -> Counter[str]:
        """Count the tests so far by outcome."""
        return Counter(result.outcome for result in self.tests())

    def finished(self) -> Run | None:
        """Return the run, if it has ended and no test failed: then it need not run again."""
        path = self.place / "run.json"
        if not path.exists():
            return None
        run = as_run(json.loads(path.read_text()))
        return run if run.passed else None

    def finish(self, run: Run) -> None:
        """Write down how the cell ended."""
        (self.place / "run.json").write_text(json.dumps(asdict(run)))


def state_of(root: Path, paths: Sequence[str]) -> str:
    """Hash what the files under `paths` hold now, those that git ignores left out."""
    command = ["git", "ls-files", "-coz", "--exclude-standard", "--", *paths]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    total = hashlib.sha256()
    for name in sorted(set(filter(None, listed.stdout.split("\0")))):
        path = root / name
        if path.is_file():  # else deleted, and the deletion is not committed
            total.update(f"{name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()[:16]


def commit_of(root: Path) -> str:
    """Return the commit at hand, with "+" if the tree differs from it."""
    command = ["git", "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.strip()


def as_run(values: dict[str, Any]) -> Run:
    """Return the run that `asdict` made `values` of."""
    return Run(**{**values, "cell": Cell(**values["cell"])})


def load(path: Path) -> list[Run]:
    """Read runs that were kept."""
    return [as_run(values) for values in json.loads(path.read_text())] if path.exists() else []


def merge(kept: Iterable[Run], new: Iterable[Run]) -> list[Run]:
    """Return the last run of each cell: a new one takes the place of a kept one.

    A run on virtual GPUs does not take the place of one on real ones.
    """
    last: dict[tuple[str, ...], Run] = {}
    for run in (*kept, *new):
        if not run.is_virtual or run.key not in last or last[run.key].is_virtual:
            last[run.key] = run
    return [last[key] for key in sorted(last)]


def save(path: Path, runs: Sequence[Run]) -> None:
    """Write runs to be kept, one a line, so that a change shows as the lines of its cells."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(run), sort_keys=True) for run in runs)
    path.write_text(f"[\n{lines}\n]\n")
