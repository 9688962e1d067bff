"""What a whole product has shown so far, kept per commit, and the page made from it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import subprocess
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass
class Product:
    """One matrix: how its cases are made and how many there are."""

    axes: dict[str, int]  # name -> number of values
    cases: int
    cover: int


@dataclass
class Result:
    """How one case ended."""

    case: str
    outcome: str  # passed, failed, skipped
    seconds: float = 0.0
    reason: str = ""


def read_results(path: Path) -> dict[str, Result]:
    """Return case -> its last result in the file; a line that was cut off counts for nothing."""
    results = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            result = Result(**json.loads(line))
            results[result.case] = result
    return results


def add_result(path: Path, result: Result) -> None:
    """Add one result at once, on a line of its own even after one that was cut off."""
    with open(path, "a") as handle:
        handle.write(f"\n{json.dumps(asdict(result))}\n")


@dataclass
class Record:
    """The results at one state of the tree, in `.matrix/STATE/`; a later run adds to them."""

    root: Path
    state: str
    results: dict[str, Result] = field(default_factory=dict)

    @classmethod
    def of_tree(cls, root: Path) -> Record:
        """Open the record of the commit at hand; uncommitted changes make it another state."""

        def git(*words: str) -> str:
            run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
            return run.stdout.strip()

        # Pages made from records are not part of what is tested.
        tested = (".", ":!docs/matrix.md", ":!docs/records")
        changes = git("diff", "HEAD", "--", *tested) + git("status", "--porcelain", "--", *tested)
        state = git("rev-parse", "--short=12", "HEAD") or "no-commit"
        if changes:
            state += "-changed-" + hashlib.sha256(changes.encode()).hexdigest()[:8]
        record = cls(root, state)
        for path in sorted(record.directory.glob("results*.jsonl")):
            record.results |= read_results(path)
        return record

    @property
    def directory(self) -> Path:
        """Where this state's files are."""
        return self.root / ".matrix" / self.state

    def settled(self, case: str) -> bool:
        """Whether a case need not run again."""
        return case in self.results and self.results[case].outcome != "failed"

    def add(self, result: Result) -> None:
        """Keep one result at once: a run that is cut off loses none."""
        self.results[result.case] = result
        self.directory.mkdir(parents=True, exist_ok=True)
        # A file per process: several shards may run at the same time.
        add_result(self.directory / f"results-{os.getpid()}.jsonl", result)

    def add_products(self, products: dict[str, Product]) -> None:
        """Remember what the whole products are; every pytest worker tells the same."""
        known = self.products()
        for name, product in products.items():
            if name not in known or known[name].cases < product.cases:
                known[name] = product
        self.directory.mkdir(parents=True, exist_ok=True)
        aside = self.directory / f"products.{os.getpid()}"
        aside.write_text(json.dumps({name: asdict(known[name]) for name in sorted(known)}))
        aside.replace(self.directory / "products.json")

    def products(self) -> dict[str, Product]:
        """Return the products seen at this state: name of the test -> product."""
        path = self.directory / "products.json"
        if not path.exists():
            return {}
        return {name: Product(**values) for name, values in json.loads(path.read_text()).items()}

    def ended(self) -> int:
        """Return how many cases of the products have ended."""
        names = set(self.products())
        return sum(case.partition("[")[0] in names for case in self.results)

    def complete(self) -> bool:
        """Whether every case of every product has ended."""
        wanted = sum(product.cases for product in self.products().values())
        return 0 < wanted <= self.ended()

    def page(self) -> str:
        """Return docs/matrix.md: what was run, where, and how it ended."""
        rows = []
        total: Counter[str] = Counter()
        for name, product in self.products().items():
            mine = [r for r in self.results.values() if r.case.partition("[")[0] == name]
            ended = Counter(result.outcome for result in mine)
            total.update(ended)
            total.update(cases=product.cases, cover=product.cover)
            axes = " x ".join(f"{axis} {count}" for axis, count in product.axes.items())
            counts = [product.cases, product.cover, *(ended[o] for o in OUTCOMES)]
            path, _, test = name.partition("::")
            rows.append(f"| `{test}`<br>{path} | {axes} | " + " | ".join(map(str, counts)) + " |")
        sums = [total[key] for key in ("cases", "cover", *OUTCOMES)]
        seconds = sum(result.seconds for result in self.results.values())
        text = PAGE.format(
            state=self.state,
            date=time.strftime("%Y-%m-%d"),
            machine=machine(),
            minutes=seconds / 60,
            rows="\n".join(rows),
            sums=" | ".join(map(str, sums)),
        )
        reasons = Counter(r.reason for r in self.results.values() if r.outcome == "skipped")
        failures = [r.case for r in self.results.values() if r.outcome == "failed"]
        if reasons:
            text += "\n## Skipped\n\n"
            text += "".join(f"- {count}: {reason}\n" for reason, count in reasons.most_common())
        if failures:
            text += "\n## Failed\n\n" + "".join(f"- `{case}`\n" for case in sorted(failures))
        return text


OUTCOMES = ("passed", "skipped", "failed")
PAGE = """\
# The whole matrix

Every case of every test marked `matrix`, where the default tests run a pairwise cover of them.
Made by `python3 noxfile.py -s matrix -- --full`; don't edit.

- commit: `{state}`
- date: {date}
- machine: {machine}
- time of all cases, one after the other: {minutes:.0f} min

| test | axes | cases | of them in the default tests | passed | skipped | failed |
| --- | --- | --- | --- | --- | --- | --- |
{rows}
| **all** | | {sums} |
"""


def machine() -> str:
    """Describe this machine by what decides the results: cores, Python, torch, GPUs."""
    from importlib.metadata import version

    words = [
        f"{os.cpu_count()} cores ({platform.machine()})",
        f"Python {platform.python_version()}",
    ]
    words.append(f"torch {version('torch')}")
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
        cards = [line.split(":")[1].split("(")[0].strip() for line in answer.stdout.splitlines()]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        cards = []
    words += [f"{count} x {card}" for card, count in Counter(cards).items()] or ["no GPU"]
    return ", ".join(words)
