"""Plants faults one at a time in copies of a layer, and runs the tests that enter them.

`python -m tasks.mutation.running LAYER [--sample N] [--seed S] [--tests PATH...] [--jobs J]
[--kind KIND...] [--file TEXT] [--limit N] [--again] [--keep]`, in `.nox/env`. A run goes on where
the last one on the same sources ended: its files are in `.matrix/mutation/LAYER/STATE/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT
from tasks.matrix.history import state_of
from tasks.matrix.record import read_results
from tasks.mutation.mutants import KINDS, Mutant, is_program, mutants_of
from tasks.mutation.page import Verdict, keep, show

__all__ = ["Entered", "Field", "try_mutant"]

TRACER = Path(__file__).parent / "tracer"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
SLACK = 60.0  # seconds beyond what the tests take: a hang is ended by the tests' own timeouts


@dataclass(frozen=True)
class Entered:
    """Which tests enter a function, and how long each test takes."""

    tests: dict[str, list[str]]  # "file:first line" -> tests
    seconds: dict[str, float]

    def fitting(self, mutant: Mutant, limit: int) -> list[str]:
        """Return the tests that enter the mutant's function, the quickest first.

        A module's own statements run when it is imported: any test that enters the module fits.
        """
        if mutant.first_line:
            found = set(self.tests.get(f"{mutant.file}:{mutant.first_line}", ()))
        else:
            there = (t for key, t in self.tests.items() if key.rpartition(":")[0] == mutant.file)
            found = {test for tests in there for test in tests}
        known = [test for test in found if test in self.seconds]
        return sorted(known, key=lambda test: (self.seconds[test], test))[:limit]


@dataclass(frozen=True)
class Field:
    """A layer and its tests, at one state of their sources.

    Args:
        root: the tree.
        layer: the layer.
        tests: paths of the tests that are to notice faults.
    """

    root: Path
    layer: str
    tests: tuple[str, ...]

    @property
    def source(self) -> Path:
        """Return the layer's source directory."""
        return self.root / "packages" / self.layer / "src" / "lamina" / self.layer

    @property
    def place(self) -> Path:
        """Return where this state's files are."""
        beneath = LAYERS[: LAYERS.index(self.layer) + 1]
        paths = [*(f"packages/{layer}" for layer in beneath), "testing", *self.tests]
        return self.root / ".matrix" / "mutation" / self.layer / state_of(self.root, paths)

    def entered(self) -> Entered:
        """Run all tests once, tracing; or find what such a run has shown."""
        path = self.place / "entered.json"
        if not path.exists():
            self.place.mkdir(parents=True, exist_ok=True)
            print(f"running the tests of {self.layer} once, to see what they enter", flush=True)
            path.write_text(json.dumps(asdict(self._trace())))
        return Entered(**json.loads(path.read_text()))

    def _trace(self) -> Entered:
        with tempfile.TemporaryDirectory(prefix="lamina-entered-") as name:
            lines, results = Path(name) / "entered", Path(name) / "results.jsonl"
            traced = {
                "LAMINA_ENTERED": str(lines),
                "LAMINA_ENTERED_SOURCE": f"{self.source}{os.sep}",
            }
            words = [*self.tests, "--results", str(results), f"--basetemp={name}/tests"]
            env = environment(TRACER, self.source.parents[1], **traced)
            command = [sys.executable, *PYTEST, *words]
            done = subprocess.run(command, cwd=self.root, env=env, capture_output=True, text=True)
            ended = read_results(results)
            failed = [case for case, result in ended.items() if result.outcome == "failed"]
            if failed or done.returncode:
                end = done.stdout[-2000:]
                raise RuntimeError(f"the tests do not pass without a fault: {failed}\n{end}")
            found: dict[str, set[str]] = defaultdict(set)
            for line in lines.read_text().splitlines() if lines.exists() else ():
                function, _, test = line.partition("\t")
                found[function].add(test)
        passed = {c: r.seconds for c, r in ended.items() if r.outcome == "passed"}
        return Entered({key: sorted(tests) for key, tests in found.items()}, passed)


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """Return this process's variables with paths to import from first."""
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    joined = os.pathsep.join([*map(str, paths), *before])
    dropped = ("LAMINA_CLOSING_LINE", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **variables, "PYTHONPATH": joined, "PYTHONDONTWRITEBYTECODE": "1"}


def try_mutant(field: Field, mutant: Mutant, entered: Entered, limit: int) -> Verdict:
    """Plant one fault in a copy and run the tests that fit, until one fails."""
    tests = entered.fitting(mutant, limit)
    if not tests:
        return Verdict(mutant, "never entered", "", 0.0)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lamina-mutant-") as name:
        copy = Path(name) / "src" / "lamina" / field.layer
        shutil.copytree(field.source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        path.write_text(mutant.plant(path.read_text()))
        (Path(name) / "tests").write_text("\n".join(tests))
        words = ["-x", f"@{name}/tests", f"--basetemp={name}/tmp", "--results", f"{name}/results"]
        seconds = SLACK + 5 * sum(entered.seconds[test] for test in tests)
        try:
            done = subprocess.run(
                [sys.executable, *PYTEST, *words],
                cwd=field.root,
                env=environment(copy.parents[1]),
                capture_output=True,
                text=True,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return Verdict(mutant, "died", f"no end within {seconds:.0f} s", seconds)
        failed = [
            r.case for r in read_results(Path(name) / "results").values() if r.outcome == "failed"
        ]
    took = round(time.monotonic() - begin, 1)
    if done.returncode == 0:
        return Verdict(mutant, "lived", f"{len(tests)} tests", took)
    return Verdict(mutant, "died", failed[0] if failed else f"exit code {done.returncode}", took)


@dataclass(frozen=True)
class Choice:
    """Which faults are tried."""

    sample: int
    seed: int
    kinds: tuple[str, ...]
    file: str

    def of(self, field: Field) -> list[Mutant]:
        """Return the sample. A larger one of the same seed holds the smaller."""
        every = [
            mutant
            for mutant in mutants_of(field.source)
            if (not self.kinds or mutant.kind in self.kinds) and self.file in mutant.file
        ]
        random.Random(self.seed).shuffle(every)
        texts = {m.file: (field.source / m.file).read_text() for m in every}
        programs = (mutant for mutant in every if is_program(mutant, texts[mutant.file]))
        return [mutant for _, mutant in zip(range(self.sample), programs, strict=False)]


def verdicts_of(place: Path) -> dict[Mutant, Verdict]:
    """Return what earlier runs at this state have shown."""
    path = place / "verdicts.jsonl"
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a line that was cut off
            verdict = Verdict.parse(line)
            found[verdict.mutant] = verdict
    return found


def run_all(
    field: Field, chosen: Sequence[Mutant], jobs: int, limit: int, again: bool
) -> Iterator[Verdict]:
    """Try every chosen fault that no earlier run has tried; yield each as it ends."""
    entered = field.entered()
    known = {} if again else verdicts_of(field.place)
    yield from (known[mutant] for mutant in chosen if mutant in known)
    missing = [mutant for mutant in chosen if mutant not in known]
    with ThreadPoolExecutor(jobs) as pool:
        for verdict in pool.map(lambda m: try_mutant(field, m, entered, limit), missing):
            with open(field.place / "verdicts.jsonl", "a") as handle:
                handle.write(f"\n{verdict.line()}\n")
            yield verdict


def options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("noxfile.py -s mutate --")
    parser.add_argument("layer", choices=LAYERS)
    parser.add_argument("--sample", type=int, default=20, help="faults to try (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--tests", nargs="+", default=(), help="default: the layer's own")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=())
    parser.add_argument("--file", default="", help="only in files whose path has this in it")
    parser.add_argument("--limit", type=int, default=40, help="tests per fault (default: 40)")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--again", action="store_true", help="also what has been tried")
    parser.add_argument("--keep", action="store_true", help="write docs/records/mutation/")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Try faults, show each, and end with the counts."""
    known = options(words)
    field = Field(ROOT, known.layer, tuple(known.tests) or (f"packages/{known.layer}/tests",))
    chosen = Choice(known.sample, known.seed, tuple(known.kind), known.file).of(field)
    verdicts = []
    for verdict in run_all(field, chosen, known.jobs, known.limit, known.again):
        verdicts.append(verdict)
        print(f"[{len(verdicts)}/{len(chosen)}] {verdict.headline()}", flush=True)
    print(show(field.layer, verdicts))
    if known.keep:
        print(f"wrote {keep(ROOT, field.layer, verdicts, field.tests).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
