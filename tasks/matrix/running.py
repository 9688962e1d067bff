"""Runs the cells of a plan one after another, and shows how far they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TextIO

from tasks.bootstrap import LAYERS
from tasks.matrix.cells import Cell, Devices, Planned, Torch
from tasks.matrix.history import OUTCOMES, CellFiles, Run, commit_of, state_of

NO_TESTS = 5  # pytest's exit code
HEARTBEAT = 30.0  # seconds between lines, where the output is no terminal
TAIL = 25  # lines of a log that are shown when pytest did not get to its tests
# What every cell tests besides its layer and those beneath it.
COMMON = ("testing", "conftest.py", "pyproject.toml", "requirements")


@dataclass(frozen=True)
class Ended:
    """One cell of the plan after the run: what it showed, or why it did not run."""

    cell: Cell
    run: Run | None
    files: CellFiles | None = None
    reason: str = ""
    broken: str = ""  # the end of pytest's output, if it did not get to its tests

    @property
    def failed(self) -> bool:
        """Whether the cell speaks against the tree."""
        return bool(self.broken) or (self.run is not None and not self.run.passed)


class Progress:
    """Shows a line about the cell that runs: rewritten on a terminal, else now and then."""

    def __init__(self, out: TextIO = sys.stdout) -> None:
        self.out = out
        self.live = out.isatty()
        self.shown = time.monotonic()
        self.place = ""  # what the lines of `update` begin with

    def tell(self, line: str) -> None:
        """Write a line that stays."""
        print(f"\r\033[K{line}" if self.live else line, file=self.out, flush=True)
        self.shown = time.monotonic()

    def update(self, text: str) -> None:
        """Write a line that the next one takes the place of."""
        if self.live:
            print(f"\r\033[K{self.place}{text}", end="", file=self.out, flush=True)
        elif time.monotonic() - self.shown > HEARTBEAT:
            self.tell(self.place + text)


@dataclass
class Bench:
    """What cells run with.

    Args:
        root: the tree whose layers are tested.
        devices: this machine's.
        torches: minor version -> the interpreter that has it.
        environment: variables that pytest gets.
        words: further options of pytest. They may choose tests, so such a run counts for no record.
        again: run cells that have passed as well.
    """

    root: Path
    devices: Devices
    torches: Mapping[str, Torch]
    environment: Mapping[str, str]
    words: Sequence[str] = ()
    again: bool = False

    def run_all(self, planned: Sequence[Planned], progress: Progress) -> list[Ended]:
        """Run every cell that can run; say at once which cannot, and why."""
        ended = [Ended(entry.cell, None, reason=entry.refusal) for entry in planned]
        ended = [entry for entry in ended if entry.reason]
        for reason, group in groupby(sorted(ended, key=lambda e: e.reason), lambda e: e.reason):
            progress.tell(f"skipped {count_cells(len(list(group)))}: {reason}")
        runnable = [entry.cell for entry in planned if not entry.refusal]
        for number, cell in enumerate(runnable, 1):
            progress.place = f"[{number}/{len(runnable)}] {cell.name}  "
            one = self.run(cell, progress)
            progress.tell(progress.place + headline(one))
            if one.broken:
                progress.tell(one.broken)
            ended.append(one)
        order = {entry.cell: place for place, entry in enumerate(planned)}
        return sorted(ended, key=lambda entry: order[entry.cell])

    def run(self, cell: Cell, progress: Progress) -> Ended:
        """Run one cell, or find that it has passed on these sources."""
        torch = self.torches[cell.torch]
        state = state_of(self.root, sources(cell))
        key = " ".join([state, *map("=".join, sorted(torch.versions.items())), *self.words])
        files = CellFiles.of(self.root, cell.name + ".part" * bool(self.words), key)
        before = files.finished()
        if before and not self.again:
            return Ended(cell, before, files, reason="has passed on these sources")
        if self.again:
            files.results.unlink(missing_ok=True)
        code = self._pytest(cell, torch, files, progress)
        counts = {outcome: files.counts()[outcome] for outcome in OUTCOMES}
        if code not in (0, 1, NO_TESTS):
            lines = files.log.read_text(errors="replace").splitlines()
            return Ended(cell, None, files, broken="\n".join(lines[-TAIL:]) or f"exit code {code}")
        seconds = round(sum(result.seconds for result in files.tests()), 1)
        when, commit, machine = time.strftime("%Y-%m-%d"), commit_of(self.root), str(self.devices)
        run = Run(cell, state, commit, when, seconds, counts, machine, torch.versions)
        files.finish(run)
        return Ended(cell, run, files)

    def _pytest(self, cell: Cell, torch: Torch, files: CellFiles, progress: Progress) -> int:
        command = [str(torch.python), "-m", "pytest", f"packages/{cell.layer}/tests"]
        command += ["--backend", cell.backend, "--world-size", str(cell.world)]
        command += ["--results", str(files.results), *self._workers(cell), *self.words]
        begin = time.monotonic()
        with files.log.open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.root, env=dict(self.environment), stdout=log, stderr=log
            )
            try:
                while process.poll() is None:
                    progress.update(f"{words_of(files)}, {time.monotonic() - begin:.0f} s")
                    time.sleep(0.25)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                process.wait()
                raise
        return process.returncode

    def _workers(self, cell: Cell) -> list[str]:
        # Ranks of NCCL have a GPU each, so only one test can run at a time.
        count = min(self.devices.cores // cell.world, 8) if cell.backend == "gloo" else 0
        return ["-n", str(count), "--dist", "loadscope"] if count >= 2 else []


def sources(cell: Cell) -> list[str]:
    """Return the paths that a cell tests."""
    beneath = LAYERS[: LAYERS.index(cell.layer) + 1]
    return [*(f"packages/{layer}" for layer in beneath), *COMMON]


def count_cells(number: int) -> str:
    """Return "1 cell" or "2 cells"."""
    return f"{number} cell{'s' * (number != 1)}"


def words_of(files: CellFiles) -> str:
    """Return the counts so far as words."""
    counts = files.counts()
    return ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o]) or "starting"


def headline(entry: Ended) -> str:
    """Return how a cell ended in one line."""
    if entry.run is None:
        return f"pytest did not get to its tests; its output ({entry.files and entry.files.log}):"
    text = f"{entry.run.summary()} in {entry.run.seconds:.0f} s"
    return f"{text} ({entry.reason}, commit {entry.run.commit})" if entry.reason else text


def clean_environment(drop: Iterable[str]) -> dict[str, str]:
    """Return this process's variables without those named."""
    left_out = set(drop)
    return {name: value for name, value in os.environ.items() if name not in left_out}
