"""`noxfile.py -s elsewhere`: the two commands of README, and an install, where nobody worked on it.

    -s elsewhere                        all default tests, over every Python that can be had
    -s elsewhere -- 3.11.2 3.14         the same over some of them
    -s elsewhere -- --sample 400        some tests of this commit, on this system's own Python

Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.bootstrap import ROOT
from tasks.elsewhere.place import Place, made
from tasks.elsewhere.pythons import interpreters, of_the_system
from tasks.elsewhere.record import RECORD, Row, add
from tasks.torches import supported

__all__ = ["main"]

# What they are called, their words, and what they print: the second one does not begin anew.
FIRST_RUNS = (
    ("the first run", ("--train.steps", "20"), "finished 20 steps"),
    (
        "its resume",
        ("--train.steps", "30", "--run.directory", "runs/pretrain"),
        r"(?s)^(?!.*\bstep 1/30).*finished 30 steps",
    ),
)
INSTALLED = ("mesh", "checkpoint")  # the lowest layer, and one that needs some of the others


@dataclass
class Trial:
    """What was tried in one place, and what came of it."""

    place: Place
    limit: float = 3600.0

    def __post_init__(self) -> None:
        self.failed: list[str] = []

    def step(self, name: str, *words: str | Path, where: str = "", ends: str = "") -> str:
        """Run a command and note whether it failed; return its last line.

        Args:
            name: what a reader calls it.
            words: the command.
            where: in which directory below the place's root; the clone, if not given.
            ends: a pattern that must be in what it prints.
        """
        print(f"\n--- elsewhere: {name}", flush=True)
        begun = time.monotonic()
        done = self.place.run(*words, limit=self.limit, where=where or self.place.tree.name)
        print(f"--- {name}: {time.monotonic() - begun:.0f} s", flush=True)
        if done.code or not re.search(ends, done.text):
            why = f"exit code {done.code}" if done.code else f"printed nothing like {ends!r}"
            self.failed.append(f"{name} ({why})")
        return done.last_line

    def train(self) -> None:
        """Train as README says, but shortly, and go on from there."""
        for name, words, ends in FIRST_RUNS:
            self.step(name, self.place.python, "noxfile.py", "-s", "train", "--", *words, ends=ends)

    def tests(self, *words: str) -> str:
        """Run the default tests; return the closing line."""
        command = [self.place.python, "noxfile.py", "-s", "tests", "--", "-q", *words]
        return self.step("the tests", *command)

    def install(self) -> None:
        """Install two layers with README's commands into an empty environment."""
        page = (ROOT / "README.md").read_text()
        self.step("an empty environment", self.place.python, "-m", "venv", self.place.root / "env")
        for layer in INSTALLED:
            (row,) = re.findall(rf"(?m)^\| \[{layer}\].*", page)
            command = row.split("`")[-2]
            # The torch that is tested here, and no byte code, which takes longer than all else.
            words = "install -q --no-compile -c requirements/torch.txt"
            path = f'PATH="{self.place.root}/env/bin:$PATH"'
            self.step(command, "bash", "-c", f"{path}; {command.replace('install', words)}")
            program = f"import lamina.{layer} as it; print(it.__file__)"
            python = self.place.root / "env/bin/python"
            self.step(f"import {layer}", python, "-c", program, where="home", ends="site-packages")


def commit() -> str:
    """Return the commit that is tried."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def try_sample(count: int, python: Path, *, stay: bool) -> int:
    """Run some tests, other ones with each commit, the first run, and the installs."""
    with made(python, stay=stay) as place:
        trial = Trial(place)
        trial.train()
        line = trial.tests("--sample", f"{count}:{commit()}")
        trial.install()
    return conclude({str(python): trial.failed}, line)


def try_whole(python: Path, version: str, torch: str, *, stay: bool) -> list[str]:
    """Run all default tests with a Python and a torch, record the line, and return what failed."""
    with made(python, stay=stay) as place:
        if torch:
            (place.tree / "requirements/torch.txt").write_text(f"torch=={torch}.*\n")
        trial = Trial(place, limit=4 * 3600.0)
        trial.train()
        line = trial.tests()
        trial.install()
        show = "import torch; print(torch.__version__)"
        used = place.run(place.tree / ".nox/env/bin/python", "-c", show, limit=300).last_line
        add(Row(version, used, commit(), line, "; ".join(trial.failed) or "all as it should be"))
    return trial.failed


def conclude(failed: dict[str, list[str]], line: str) -> int:
    """Print what failed, and the closing line of the tests last; return the exit code."""
    for name, steps in failed.items():
        for step in steps:
            print(f"elsewhere, {name}: failed: {step}", flush=True)
    print(f"elsewhere: {line}", flush=True)
    return int(any(failed.values()))


def main(words: list[str]) -> int:
    """Run what the words ask for and return the exit code."""
    parser = argparse.ArgumentParser(prog="noxfile.py -s elsewhere --", description=__doc__)
    parser.add_argument("pythons", nargs="*", help="versions, such as 3.11.2 or 3.14; all, if none")
    parser.add_argument("--sample", type=int, metavar="COUNT", help="run so many of the tests")
    parser.add_argument("--python", type=Path, help="an interpreter; of the system, for a sample")
    parser.add_argument("--torch", choices=supported(), help="one version of torch alone")
    parser.add_argument("--stay", action="store_true", help="leave the clones where they are")
    asked = parser.parse_args(words)
    if asked.sample:
        return try_sample(asked.sample, asked.python or of_the_system(), stay=asked.stay)
    have, missing = interpreters(asked.pythons, asked.python)
    for version, why in missing.items():
        print(f"Python {version} was not reached: {why}", flush=True)
        add(Row(version, "", commit(), "", f"not reached: {why}"))
    failed: dict[str, list[str]] = {}
    for version, python in have.items():
        ends = [supported()[0], supported()[-1]] if version in (min(have), max(have)) else []
        for torch in [asked.torch] if asked.torch else ["", *ends]:
            name = f"Python {version}{torch and f', torch {torch}'}"
            print(f"\n=== {name}: {shlex.quote(str(python))}", flush=True)
            failed[name] = try_whole(python, version, torch, stay=asked.stay)
    return conclude(failed, f"{len(failed)} environments, {RECORD.relative_to(ROOT)}")
