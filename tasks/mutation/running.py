"""Plants faults one at a time in copies of a layer, and runs the tests that reach them.

`python -m tasks.mutation.running LAYER [--sample N] [--seed S] [--tests PATH...] [--jobs J]
[--kind KIND...] [--file TEXT] [--limit N] [--again lived|all] [--keep]`, in `.nox/env`. A run goes
on where the last one on the same sources ended: its files are in `.matrix/mutation/LAYER/STATE/`.
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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT
from tasks.matrix.history import state_of
from tasks.matrix.record import read_results
from tasks.mutation.mutants import KINDS, Mutant, is_program, mutants_of
from tasks.mutation.page import Conditions, Verdict, keep, show

TRACER = Path(__file__).parent / "tracer"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
SLACK = 60.0  # seconds beyond what the tests take: a hang is ended by the tests' own timeouts


@dataclass(frozen=True)
class Entered:
    """Which tests reach a block of the layers, how long each test takes, and which fail.

    `tests` maps `layer/file:line` of a block to tests; `failed` are no use for finding a fault.
    """

    tests: dict[str, list[str]]
    seconds: dict[str, float]
    failed: tuple[str, ...] = ()

    def fitting(self, layer: str, mutant: Mutant, limit: int) -> list[str]:
        """Return tests that reach the mutant's block: one case of each test function first.

        Cases of one function see much the same. Among these, and then among second cases, the
        quickest come first. A module's own statements run when it is imported, and what they made
        can be read without a call: tests that reach a block of the module come first, then all.
        """
        if mutant.block:
            near = set(self.tests.get(f"{layer}/{mutant.file}:{mutant.block}", ()))
        else:
            file = f"{layer}/{mutant.file}"
            there = (t for key, t in self.tests.items() if key.rpartition(":")[0] == file)
            near = {test for tests in there for test in tests}
        known = [test for test in self.seconds if test in near or not mutant.block]
        known.sort(key=lambda test: (self.seconds[test], test))
        cases: Counter[str] = Counter()
        turns = {}
        for test in known:
            turns[test] = cases[test.partition("[")[0]]
            cases[test.partition("[")[0]] += 1
        return sorted(known, key=lambda test: (test not in near, turns[test]))[:limit]


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
    def sources(self) -> list[str]:
        """Return what all tests run on."""
        return [*(f"packages/{layer}/src" for layer in LAYERS), "testing"]

    @property
    def place(self) -> Path:
        """Return where this state's verdicts are."""
        state = state_of(self.root, [*self.sources, *self.tests])
        return self.root / ".matrix" / "mutation" / self.layer / state

    def entered(self) -> Entered:
        """Run all tests once, tracing; or find what such runs have shown."""
        tests: dict[str, list[str]] = defaultdict(list)
        seconds: dict[str, float] = {}
        failed: tuple[str, ...] = ()
        for path in self.tests:
            one = self._entered_by(path)
            seconds |= one.seconds
            failed += tuple(one.failed)
            for key, found in one.tests.items():
                tests[key] += found
        return Entered(dict(tests), seconds, failed)

    def _entered_by(self, tests: str) -> Entered:
        """Return what one path of tests reaches, in all layers: one run serves each of them."""
        state = state_of(self.root, [*self.sources, tests])
        path = self.root / ".matrix" / "mutation" / "entered" / f"{state}.json"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            print(f"running {tests} once, to see what its tests reach", flush=True)
            path.write_text(json.dumps(asdict(self._trace(tests))))
        return Entered(**json.loads(path.read_text()))

    def _trace(self, tests: str) -> Entered:
        with tempfile.TemporaryDirectory(prefix="lamina-entered-") as name:
            lines, results = Path(name) / "entered", Path(name) / "results.jsonl"
            traced = {
                "LAMINA_ENTERED": str(lines),
                "LAMINA_ENTERED_PACKAGES": f"{self.root / 'packages'}{os.sep}",
            }
            sources = (self.root / "packages" / layer / "src" for layer in LAYERS)
            words = [tests, "--results", str(results), f"--basetemp={name}/tests"]
            done = subprocess.run(
                [sys.executable, *PYTEST, *words],
                cwd=self.root,
                env=environment(TRACER, *(path for path in sources if path.exists()), **traced),
                capture_output=True,
                text=True,
            )
            ended = read_results(results)
            if done.returncode not in (0, 1):  # 1: some tests failed
                raise RuntimeError(f"{tests} did not run to its end:\n{done.stdout[-2000:]}")
            found: dict[str, set[str]] = defaultdict(set)
            for line in lines.read_text().splitlines() if lines.exists() else ():
                block, _, test = line.partition("\t")
                found[block].add(test)
        passed = {c: r.seconds for c, r in ended.items() if r.outcome == "passed"}
        failed = tuple(c for c, r in ended.items() if r.outcome == "failed")
        return Entered({key: sorted(tests) for key, tests in found.items()}, passed, failed)


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """Return this process's variables with paths to import from first."""
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    joined = os.pathsep.join([*map(str, paths), *before])
    dropped = ("LAMINA_CLOSING_LINE", "PYTEST_CURRENT_TEST")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **variables, "PYTHONPATH": joined, "PYTHONDONTWRITEBYTECODE": "1"}


def try_mutant(field: Field, mutant: Mutant, entered: Entered, limit: int) -> Verdict:
    """Plant one fault in a copy and run the tests that fit, until one fails."""
    tests = entered.fitting(field.layer, mutant, limit)
    if not tests:
        return Verdict(mutant, "never entered", "", 0.0)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lamina-mutant-") as name:
        copy = Path(name) / "src" / "lamina" / field.layer
        shutil.copytree(field.source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        path.write_text(mutant.plant(path.read_text()))
        seconds = SLACK + 5 * sum(entered.seconds[test] for test in tests)
        try:
            code, failed = run_tests(field.root, tests, seconds, "-x", first=[copy.parents[1]])
        except subprocess.TimeoutExpired:
            return Verdict(mutant, "died", f"no end within {seconds:.0f} s", seconds)
    took = round(time.monotonic() - begin, 1)
    if code == 0:
        return Verdict(mutant, "lived", f"{len(tests)} tests", took)
    return Verdict(mutant, "died", failed[0] if failed else f"exit code {code}", took)


def run_tests(
    root: Path, tests: Sequence[str], seconds: float, *words: str, first: Sequence[Path] = ()
) -> tuple[int, list[str]]:
    """Run tests; return pytest's exit code and those that failed."""
    with tempfile.TemporaryDirectory(prefix="lamina-tests-") as name:
        (Path(name) / "tests").write_text("\n".join(tests))
        places = [f"@{name}/tests", f"--basetemp={name}/tmp", "--results", f"{name}/results"]
        done = subprocess.run(
            [sys.executable, *PYTEST, *words, *places],
            cwd=root,
            env=environment(*first),
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        results = read_results(Path(name) / "results")
    return done.returncode, [case for case, r in results.items() if r.outcome == "failed"]


def in_doubt(field: Field, verdicts: Sequence[Verdict], entered: Entered) -> list[str]:
    """Run once more, without a fault, the tests that have killed; return those that fail."""
    killers = {verdict.by for verdict in verdicts if verdict.outcome == "died"}
    tests = sorted(killers & set(entered.seconds))
    seconds = SLACK + 10 * sum(entered.seconds[test] for test in tests)
    return run_tests(field.root, tests, seconds)[1] if tests else []


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
    field: Field, entered: Entered, chosen: Sequence[Mutant], jobs: int, limit: int, again: str = ""
) -> Iterator[Verdict]:
    """Try every chosen fault that no earlier run has tried; yield each as it ends.

    `again` is "lived" for what no test has found too, and "all" for everything.
    """
    known = {} if again == "all" else verdicts_of(field.place)
    if again == "lived":
        known = {mutant: verdict for mutant, verdict in known.items() if verdict.outcome == "died"}
    field.place.mkdir(parents=True, exist_ok=True)
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
    parser.add_argument("--again", choices=("lived", "all"), default="", help="also what has been")
    parser.add_argument("--keep", action="store_true", help="write docs/records/mutation/")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Try faults, show each, and end with the counts."""
    known = options(words)
    field = Field(ROOT, known.layer, tuple(known.tests) or (f"packages/{known.layer}/tests",))
    chosen = Choice(known.sample, known.seed, tuple(known.kind), known.file).of(field)
    entered = field.entered()
    for test in entered.failed:
        print(f"left out, as it fails without a fault: {test}", flush=True)
    verdicts = []
    for verdict in run_all(field, entered, chosen, known.jobs, known.limit, known.again):
        verdicts.append(verdict)
        print(f"[{len(verdicts)}/{len(chosen)}] {verdict.headline()}", flush=True)
    doubtful = in_doubt(field, verdicts, entered)
    for test in doubtful:
        print(f"in doubt: {test} has killed, and fails without a fault too", flush=True)
    print(show(field.layer, verdicts))
    if known.keep:
        how = Conditions(field.tests, known.seed, known.limit, entered.failed, tuple(doubtful))
        print(f"wrote {keep(ROOT, field.layer, verdicts, how).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
