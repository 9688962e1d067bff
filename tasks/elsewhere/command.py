"""`noxfile.py -s elsewhere`: the two commands of README, and an install, where nobody worked on it.

    -s elsewhere                        all default tests, over every Python that can be had
    -s elsewhere -- 3.11.2 3.14         the same over some of them
    -s elsewhere -- --sample 400        some tests of this commit, on this system's own Python

Imports the standard library alone.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tasks.bootstrap import ROOT
from tasks.elsewhere.place import Place, made
from tasks.elsewhere.pythons import interpreters, of_the_system, version_of
from tasks.elsewhere.record import Row, add
from tasks.torches import supported

# What they are called, their words, and what they print.
FIRST_RUNS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("the first run", ("--train.steps", "20"), "finished 20 steps"),
    (
        "its resume",
        ("--train.steps", "30", "--run.directory", "runs/pretrain"),
        r"(?s)continuing \S+ after step 20.*finished 30 steps",
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
        self.closing_line = ""

    def step(self, name: str, *words: str | Path, where: str = "", ends: str = "") -> str:
        """Run a command and note whether it failed; return its last line.

        Args:
            name: what a reader calls it.
            words: the command.
            where: in which directory below the place's root; the clone, if not given.
            ends: a pattern that must be in what it prints.
        """
        print(f"\n--- elsewhere: {name}", flush=True)
        begun, worked = time.monotonic(), processor_seconds()
        done = self.place.run(*words, limit=self.limit, where=where or self.place.tree.name)
        took, worked = time.monotonic() - begun, processor_seconds() - worked
        print(f"--- {name}: {took:.0f} s, {worked:.0f} s of processor", flush=True)
        if done.code or not re.search(ends, done.text):
            why = f"exit code {done.code}" if done.code else f"printed nothing like {ends!r}"
            self.failed.append(f"{name} ({why})")
        return done.last_line

    def train(self) -> None:
        """Train as README says, but shortly, and go on from there."""
        for name, words, ends in FIRST_RUNS:
            command = ("noxfile.py", "-s", "train", "--", *words)
            self.step(name, self.place.python, *command, ends=ends)

    def tests(self, *words: str) -> None:
        """Run the default tests."""
        command = ("noxfile.py", "-s", "tests", "--", "-q", *words)
        self.closing_line = self.step("the tests", self.place.python, *command)

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


def processor_seconds() -> float:
    """Return what commands that have ended have worked, on all cores."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def commit() -> str:
    """Return the commit that is tried."""
    words = ["git", "-C", str(ROOT), "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def attempt(python: Path, *, torch: str, count: int, keep: bool, stay: bool) -> Trial:
    """Try everything in a new place with a Python and a torch.

    Args:
        python: the interpreter.
        torch: a minor version, or "" for that of `requirements/torch.txt`.
        count: how many of the default tests, others with each commit; 0 means all.
        keep: whether the record gets a row.
        stay: whether the place stays.
    """
    with made(python, stay=stay) as place:
        if torch:
            (place.tree / "requirements/torch.txt").write_text(f"torch=={torch}.*\n")
        trial = Trial(place, limit=1800.0 if count else 4 * 3600.0)
        trial.train()
        trial.tests(*(("--sample", f"{count}:{commit()}") if count else ()))
        trial.install()
        if keep:
            show = "import torch; print(torch.__version__)"
            used = place.run(place.tree / ".nox/env/bin/python", "-c", show, limit=300).last_line
            version = ".".join(map(str, version_of(python)))
            tests = f"{'a sample: ' if count else ''}{trial.closing_line}"
            add(Row(version, used, commit(), tests, "; ".join(trial.failed) or "as they should be"))
    return trial


def main(words: list[str]) -> int:
    """Run what the words ask for and return the exit code."""
    parser = argparse.ArgumentParser(prog="noxfile.py -s elsewhere --", description=__doc__)
    parser.add_argument("pythons", nargs="*", help="versions, such as 3.11.2 or 3.14; all, if none")
    parser.add_argument("--sample", type=int, default=0, metavar="COUNT", help="run so many tests")
    parser.add_argument("--torch", choices=supported(), help="one version of torch alone")
    parser.add_argument("--keep", action="store_true", help="record a sample too")
    parser.add_argument("--stay", action="store_true", help="leave the clones where they are")
    asked = parser.parse_args(words)
    if asked.sample and not asked.pythons:
        have, missing = [of_the_system()], dict[str, str]()
    else:
        have, missing = interpreters(asked.pythons)
    keep = asked.keep or not asked.sample
    for version, why in missing.items():
        print(f"Python {version} was not reached: {why}", flush=True)
        if keep:
            add(Row(version, "", commit(), "", f"not reached: {why}"))
    failed, lines = [], []
    for python in have:
        # The ends of the range of Pythons meet the ends of the range of torch.
        ends = [supported()[0], supported()[-1]] if python in (have[0], have[-1]) else []
        whole = ["", *ends] if not asked.sample else [""]
        for torch in [asked.torch] if asked.torch else whole:
            name = f"{python}{torch and f', torch {torch}'}"
            print(f"\n=== {name}", flush=True)
            trial = attempt(python, torch=torch, count=asked.sample, keep=keep, stay=asked.stay)
            failed += [f"{name}: failed: {step}" for step in trial.failed]
            lines.append(f"{name}: {trial.closing_line}")
    print("", *failed, *lines, sep="\n", flush=True)
    return int(bool(failed))
