"""Plants faults in code that only CUDA reaches; the virtual GPU's tests are to notice them.

`python3 noxfile.py -s virtual-gpu -- python -m tasks.mutation.cuda [--sample N] [--seed S]
[--limit N] [--minutes M] [--tame] [--again] [--keep]`; the CPU's tests need `.nox/env`. Each part
of the tests runs once on the virtual GPU and once on the CPU, traced. A block is CUDA's own if
tests reach it on the GPU alone, in a class or function that names CUDA. Layers take turns. What
lives in the tame order is tried under an adversary, and in some layers by tests on the CPU. A run
that was cut off goes on.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT
from tasks.matrix.history import commit_of, state_of
from tasks.matrix.record import read_results
from tasks.mutation.mutants import Mutant, is_program, mutants_of
from tasks.mutation.page import EXPLAINED, Verdict, explanation
from tasks.mutation.running import PYTEST, SLACK, TRACER, Entered, environment

PLANTED = ("collectives", "ddp", "fsdp", "models", "checkpoint")  # layers
NCCL = ("--backend", "nccl", "--world-size", "2")
# The tests: words for pytest on the virtual GPU, and for the CPU without NCCL's.
PARTS: dict[str, tuple[str, ...]] = {
    "step": ("tests/test_gpu.py",),
    # Compiled blocks take minutes each there.
    "models": ("packages/models/tests/test_on_gpu.py", "-k", "not compile and not flex"),
    "collectives": tuple(
        f"packages/collectives/tests/test_{name}.py" for name in ("reductions", "move")
    )
    + NCCL,
    "ddp": ("packages/ddp/tests/test_strategies.py", *NCCL),
    "fsdp": ("packages/fsdp/tests/test_strategies.py", *NCCL),
    "checkpoint": ("packages/checkpoint/tests/test_strategies.py", *NCCL),
    "parity": ("packages/fsdp/tests/test_parity.py", *NCCL),
    "windows": ("packages/ddp/tests/test_windows.py", *NCCL),
    "kernels": ("packages/models/tests/test_on_gpu.py", "-k", "temporary or memory"),
    "steps": ("tests/virtual_gpu/test_steps.py", "-k", "large_block"),
    "left out": ("tests/virtual_gpu/test_left_out.py", "-k", "another_stream"),
    "host waits": ("tests/virtual_gpu/test_host_waits.py",),
    "alone": ("tests/virtual_gpu/test_on_a_gpu_alone.py",),
}
# On the CPU: the same but for what skips there, and for models others.
ON_CPU: dict[str, tuple[str, ...]] = {
    **{
        part: words[: words.index("--backend")]
        for part, words in PARTS.items()
        if "--backend" in words and part != "windows"
    },
    "mesh parity": ("packages/models/tests/test_mesh_parity.py",),
}
# What lives on the virtual GPU is tried by these, on the CPU with a GPU's streams played.
PLAYED = {
    "collectives": tuple(
        f"packages/collectives/tests/test_{name}.py" for name in ("peer_windows", "handles")
    ),
    "ddp": ("packages/ddp/tests/test_reductions.py", "-k", "room_for_a_buffer"),
}
NAMES_CUDA = re.compile(r"is_cuda|torch\.cuda|\"cuda\"|pin_memory|record_stream|Stream|Event\b")
TAME = {"VGPU_COMPUTE": "at-once"}
ADVERSARY = {"VGPU_COMPUTE": "adversarial", "VGPU_SEED": "1"}
DEVICE = {"VGPU_DEVICES": "8", "VGPU_RACES": "fail"}
CPU = ROOT / ".nox" / "env" / "bin" / "python"
PLAYED_SECONDS = 300.0
TRACE_SECONDS = 100.0  # what a part has not begun by then is not among the tests
PLACE = ROOT / ".matrix" / "mutation" / "cuda"
PAGE = """\
# Faults planted in code that only CUDA reaches

Made by `python3 noxfile.py -s virtual-gpu -- python -m tasks.mutation.cuda --keep` on {date}
at commit `{commit}`; don't edit.
The faults are a random sample (seed {seed}) in which the layers take turns. Each is one small
change in a copy of a layer, in a class or function that names CUDA. It is in a block of statements
that tests reach on the [virtual GPU](../../virtual-gpu.md), and that the same files of tests
with `test_mesh_parity.py` do not reach on a CPU.
Of each part of the tests that reach it, {limit} tests at most run on the virtual GPU, at
once, then under an adversary (seed 1) unless it says "at once alone". No end is a death.
What lives in collectives or ddp is tried on the CPU, by tests that play a GPU's streams.
Tests: {tests}. On the CPU: {played}.

{blocks} such blocks have {faults} faults. Of {count} planted, {died} died and {lived} lived.

| layer | planted | died | lived |
| --- | --- | --- | --- |
{layers}

| fault | kind | layer | outcome | by |
| --- | --- | --- | --- | --- |
{rows}

## What lives

{alive}
"""


def source(layer: str) -> Path:
    """Return a layer's source directory."""
    return ROOT / "packages" / layer / "src" / "lamina" / layer


def ranks_of(part: str) -> tuple[str, ...]:
    """Return the words for pytest that choose a part's ranks."""
    words = PARTS[part]
    return words[words.index("--backend") :] if "--backend" in words else ()


def state() -> str:
    """Return a digest of what the tests run on."""
    return state_of(ROOT, [*(f"packages/{layer}/src" for layer in LAYERS), "testing"])[:12]


def pytest(
    python: Path | str, words: Sequence[str], seconds: float, *first: Path, **variables: str
) -> tuple[int, Entered]:
    """Run tests, tracing if the tracer is among `first`; return pytest's exit code and what ran.

    The code is -1 if they did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="lamina-cuda-") as name:
        results, lines = Path(name) / "results", Path(name) / "entered"
        traced = {"LAMINA_ENTERED": str(lines)} if TRACER in first else {}
        plugin = () if python == CPU else ("-p", "lamina_testing.plugin")  # `.nox/env` loads it
        command = [str(python), *PYTEST, *plugin, *words]
        with subprocess.Popen(
            [*command, f"--basetemp={name}/tmp", "--results", str(results)],
            cwd=ROOT,
            env=environment(*first, **DEVICE, **traced, **variables),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # pytest ends its ranks, and says what has run
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10.0)
                process.kill()
                code = -1
        found: dict[str, set[str]] = defaultdict(set)
        for line in lines.read_text().splitlines() if lines.exists() else ():
            block, _, test = line.partition("\t")
            found[block].add(test)
        ended = read_results(results) if results.exists() else {}
    passed = {case: r.seconds for case, r in ended.items() if r.outcome == "passed"}
    failed = tuple(case for case, r in ended.items() if r.outcome == "failed")
    return code, Entered({key: sorted(tests) for key, tests in found.items()}, passed, failed)


def entered(part: str, device: str) -> Entered:
    """Run a part once, tracing, on "gpu" or "cpu"; or find what such a run has shown."""
    path = PLACE / state() / f"{part.replace(' ', '_')}-{device}.json"
    if not path.exists():
        print(f"running {part} on {device}, to see what its tests reach", flush=True)
        sources = (ROOT / "packages" / layer / "src" for layer in LAYERS)
        words = PARTS[part] if device == "gpu" else ON_CPU[part]
        python = sys.executable if device == "gpu" else CPU
        packages = {"LAMINA_ENTERED_PACKAGES": f"{ROOT / 'packages'}{os.sep}"}
        settings = TAME if device == "gpu" else {}
        code, seen = pytest(python, words, TRACE_SECONDS, TRACER, *sources, **packages, **settings)
        if not seen.seconds:
            raise RuntimeError(f"no test of {part} passed on {device}: exit code {code}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(seen)))
    return Entered(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Reach:
    """What each part's tests reach on the virtual GPU, and what they reach on the CPU."""

    parts: dict[str, Entered]
    on_cpu: frozenset[str]

    @classmethod
    def measure(cls) -> Reach:
        """Run every part on both devices, or find earlier runs on the same sources."""
        parts = {part: entered(part, "gpu") for part in PARTS}
        return cls(parts, frozenset(key for part in ON_CPU for key in entered(part, "cpu").tests))

    @property
    def own(self) -> set[str]:
        """Return the blocks that are reached on the GPU alone."""
        return {key for seen in self.parts.values() for key in seen.tests} - self.on_cpu

    def fitting(self, layer: str, mutant: Mutant, limit: int) -> dict[str, list[str]]:
        """Return tests of each part that reach the mutant's block: the layer's own come first."""
        near = {part: seen.fitting(layer, mutant, limit) for part, seen in self.parts.items()}
        near = {part: tests for part, tests in near.items() if tests}
        order = sorted(near, key=lambda p: (p != layer, self.parts[p].seconds[near[p][0]]))
        return {part: near[part] for part in order}

    def seconds(self, chosen: dict[str, list[str]], part: str) -> float:
        """Return how long a part's chosen tests may take."""
        return SLACK + 3 * sum(self.parts[part].seconds[test] for test in chosen[part])


def faults(reach: Reach) -> dict[str, list[Mutant]]:
    """Return the faults in CUDA's own blocks, by layer."""
    own = reach.own
    found: dict[str, list[Mutant]] = {}
    for layer in PLANTED:
        texts = {
            str(path.relative_to(source(layer))): path.read_text()
            for path in source(layer).rglob("*.py")
        }
        found[layer] = [
            mutant
            for mutant in mutants_of(source(layer))
            if f"{layer}/{mutant.file}:{mutant.block}" in own
            and NAMES_CUDA.search(around(mutant, texts[mutant.file]))
            and reach.fitting(layer, mutant, 1)
            and is_program(mutant, texts[mutant.file])
        ]
    return found


def around(mutant: Mutant, text: str) -> str:
    """Return the class, or the function outside of classes, that a mutant is in."""
    lines = text.splitlines()
    for node in ast.parse(text).body:
        if node.lineno <= mutant.line <= (node.end_lineno or node.lineno):
            return "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return ""


def sample(found: dict[str, list[Mutant]], count: int, seed: int) -> list[tuple[str, Mutant]]:
    """Return so many faults: the layers take turns, and each takes its own at random."""
    drawn = []
    for layer, mutants in found.items():
        order = sorted(mutants)
        random.Random(seed).shuffle(order)
        drawn.append([(layer, mutant) for mutant in order])
    turns = (pair for row in zip_longest(*drawn) for pair in row if pair)
    return [pair for pair, _ in zip(turns, range(count), strict=False)]


def attempt(reach: Reach, layer: str, mutant: Mutant, limit: int, tame: bool = False) -> Verdict:
    """Plant one fault in a copy and run the tests that fit until one fails.

    They run at once, then under the adversary if not `tame`.
    """
    chosen = reach.fitting(layer, mutant, limit)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lamina-mutant-") as name:
        copy = Path(name) / "src" / "lamina" / layer
        shutil.copytree(source(layer), copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / mutant.file
        path.write_text(mutant.plant(path.read_text()))
        for order in (TAME,) if tame else (TAME, ADVERSARY):
            for part, tests in chosen.items():
                words = [*tests, "-x", *ranks_of(part)]
                seconds = reach.seconds(chosen, part)
                code, seen = pytest(sys.executable, words, seconds, copy.parents[1], **order)
                took = round(time.monotonic() - begin, 1)
                where = order["VGPU_COMPUTE"]
                if code == -1:
                    return Verdict(mutant, "died", f"{where}: no end within {seconds:.0f} s", took)
                if code:
                    by = seen.failed[0] if seen.failed else f"exit code {code}"
                    again = [*seen.failed[:1], *words[len(tests) :]]
                    late = order is ADVERSARY
                    if late and pytest(sys.executable, again, seconds, **order)[0]:
                        continue  # it fails without the fault too
                    return Verdict(mutant, "died", f"{where}: {by}", took)
        if layer in PLAYED:
            code, seen = pytest(CPU, [*PLAYED[layer], "-x"], PLAYED_SECONDS, copy.parents[1])
            if code:
                by = seen.failed[0] if seen.failed else f"exit code {code}"
                took = round(time.monotonic() - begin, 1)
                return Verdict(mutant, "died", f"on a CPU: {by}", took)
    passed = sum(map(len, chosen.values()))
    how = f"{passed} tests, {'at once alone' if tame else 'both orders'}"
    return Verdict(mutant, "lived", how, round(time.monotonic() - begin, 1))


def tried(
    reach: Reach,
    chosen: Sequence[tuple[str, Mutant]],
    limit: int,
    minutes: float,
    again: bool,
    tame: bool,
) -> Iterator[tuple[str, Verdict]]:
    """Yield each fault's layer and verdict; those that no earlier run has tried are planted."""
    end = time.monotonic() + 60 * minutes
    path = PLACE / state() / "verdicts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    known = {verdict.mutant: verdict for verdict in map(Verdict.parse, lines)}
    for layer, mutant in chosen:
        verdict = known.get(mutant)
        if not verdict or (again and verdict.outcome == "lived"):
            if time.monotonic() > end:
                if verdict:
                    yield layer, verdict
                continue
            verdict = attempt(reach, layer, mutant, limit, tame)
            with open(path, "a") as handle:
                handle.write(f"{verdict.line()}\n")
        yield layer, verdict


def page(
    reach: Reach,
    found: dict[str, list[Mutant]],
    verdicts: Sequence[tuple[str, Verdict]],
    seed: int,
    limit: int,
) -> str:
    """Return the record."""
    table = tomllib.loads(EXPLAINED.read_text())
    alive, rows, layers = [], [], []
    for layer, verdict in sorted(verdicts, key=lambda pair: (pair[0], pair[1].mutant)):
        place, _, change = verdict.mutant.name.partition(" ")
        change = change.partition(": ")[2].replace("|", "\\|")
        by = verdict.by.replace("|", "\\|")
        cells = (f"`{place}` `{change}`", verdict.mutant.kind, layer, verdict.outcome, f"`{by}`")
        rows.append(f"| {' | '.join(cells)} |")
        if verdict.outcome != "died":
            why = explanation(layer, verdict.mutant, table)
            alive.append(f"- {layer}, `{verdict.mutant.name}`" + (f": {why}" if why else ""))
    for layer in PLANTED:
        counts = Counter(verdict.outcome for of, verdict in verdicts if of == layer)
        layers.append(f"| {layer} | {counts.total()} | {counts['died']} | {counts['lived']} |")
    counts = Counter(verdict.outcome for _, verdict in verdicts)
    every = [m for mutants in found.values() for m in mutants]
    tests = dict.fromkeys(w for words in PARTS.values() for w in words if w.endswith(".py"))
    blocks = {(m.file, m.block) for m in every}
    return PAGE.format(
        date=time.strftime("%Y-%m-%d"),
        commit=commit_of(ROOT),
        seed=seed,
        limit=limit,
        tests=", ".join(f"`{name}`" for name in tests),
        played=", ".join(
            f"`{name}`" for names in PLAYED.values() for name in names if name.endswith(".py")
        ),
        blocks=len(blocks),
        faults=len(every),
        count=len(verdicts),
        died=counts["died"],
        lived=counts["lived"],
        layers="\n".join(layers),
        rows="\n".join(rows),
        alive="\n".join(alive) or "Nothing.",
    )


def options(words: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser("tasks.mutation.cuda")
    parser.add_argument("--sample", type=int, default=30, help="faults to try (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--limit", type=int, default=4, help="tests per fault (default: 4)")
    parser.add_argument("--minutes", type=float, default=60.0, help="then no fault begins")
    parser.add_argument("--tame", action="store_true", help="not under the adversary")
    parser.add_argument("--again", action="store_true", help="try what has lived once more")
    parser.add_argument("--keep", action="store_true", help="write the record")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Try faults, show each, and end with the counts."""
    known = options(words)
    reach = Reach.measure()
    found = faults(reach)
    chosen = sample(found, known.sample, known.seed)
    print({layer: len(mutants) for layer, mutants in found.items()}, flush=True)
    verdicts = []
    for layer, verdict in tried(reach, chosen, known.limit, known.minutes, known.again, known.tame):
        verdicts.append((layer, verdict))
        print(f"[{len(verdicts)}/{len(chosen)}] {layer} {verdict.headline()}", flush=True)
    counts = Counter(verdict.outcome for _, verdict in verdicts)
    print(f"of {len(verdicts)} faults {counts['died']} died, {counts['lived']} lived")
    if known.keep:
        record = ROOT / "docs" / "records" / "mutation" / "cuda.md"
        record.write_text(page(reach, found, verdicts, known.seed, known.limit))
        print(f"wrote {record.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
