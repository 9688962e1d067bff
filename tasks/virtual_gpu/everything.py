"""All of ours that asks for a GPU, on the virtual one: tests marked for GPUs, and the NCCL cells.

`python3 noxfile.py -s virtual-gpu -- all` runs every part, `-- all ddp-2 models` some,
`-- all --share 1/4` the first quarter, and `--minutes 5` ends after that time. A part that was cut
off goes on in the next run. What compares values that the device would have computed is left out
(`VGPU_VALUES=unknown`); the rest is asserted. What fails so runs once more with values, because a
number of the device may decide what a program does. Checkpoints have values from the start: their
ranks send each other objects, whose sizes the device adds up. With `--compute at-once`, or another
order, all parts have. `--keep` writes `docs/records/virtual-gpu.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.bootstrap import LAYERS
from tasks.cores import workers
from tasks.matrix.record import Result, read_results

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / ".virtual-gpu"
RECORD = ROOT / "docs" / "records" / "virtual-gpu.md"
BY_HAND = "## From other commands\n"  # what follows in the record stays
WORLDS = (1, 2, 4, 8)
ORDERS = ("none", "at-once", "clock", "late", "adversarial")
MARKED = {
    "step": ("tests/test_gpu.py",),
    "models": tuple(
        f"packages/models/tests/test_{name}on_gpu.py" for name in ("", "moe_", "mamba_")
    ),
    "registration": ("packages/collectives/tests/test_registration.py",),
}
WITH_VALUES = ("checkpoint",)  # layers whose cells say little without
GRACE = 20.0  # seconds in which an interrupted part may end by itself
OK, FAILED, NO_TESTS = 0, 1, 5  # pytest's exit codes
# A slow test's stacks are printed after ten minutes only: printing them while other threads run has
# crashed Python, and tests whose kernels are interpreted take minutes.
PLUGINS = ("-p", "lamina_testing.plugin", "-q", "--tb=short", "-o", "faulthandler_timeout=600")


@dataclass(frozen=True)
class Part:
    """Tests of one kind: its name, and the words for pytest."""

    name: str
    words: tuple[str, ...]
    order: str = "none"

    @property
    def results(self) -> Path:
        """Return the file that has each test's result."""
        kind = "" if self.order == "none" else f"-{self.order}"
        return RESULTS / f"{self.name}{kind}.jsonl"

    @property
    def settings(self) -> dict[str, str]:
        """Return the device's settings: it computes in some order, or values are left out."""
        # Ranks are processes here, so copies and messages move even where kernels compute nothing.
        values = {"VGPU_VALUES": "unknown", "VGPU_SHARE": "1"} if self.order == "none" else {}
        return {**values, "VGPU_COMPUTE": self.order, "VGPU_DEVICES": "8"}

    def ended(self) -> list[Result]:
        """Return the last result of each test that has ended."""
        return list(read_results(self.results).values())

    def failed(self) -> list[Result]:
        """Return the results that are failures."""
        return [result for result in self.ended() if result.outcome == "failed"]

    def again(self) -> Part:
        """Return what failed, with values."""
        options = [word for word in self.words if not word.startswith(("packages/", "tests/"))]
        cases = [result.case for result in self.failed()]
        return Part(f"{self.name}-again", (*cases, *options), "at-once")


def parts(order: str = "none") -> list[Part]:
    """Return all parts: files marked for GPUs, then each layer on each number of NCCL ranks."""
    found = [Part(name, files, order) for name, files in MARKED.items()]
    for layer in LAYERS:
        for world in WORLDS:
            words = (f"packages/{layer}/tests", "--backend", "nccl", "--world-size", str(world))
            own = "at-once" if order == "none" and layer in WITH_VALUES else order
            found.append(Part(f"{layer}-{world}", words, own))
    return found


def run(part: Part, seconds: float) -> bool:
    """Run a part for so long; what has ended without a failure before is not run again.

    Returns whether it came to its end: no test of it is left.
    """
    RESULTS.mkdir(exist_ok=True)
    env = {**os.environ, **part.settings}
    more = ["--results", str(part.results)]
    command = [sys.executable, "-m", "pytest", *PLUGINS, *workers("worksteal"), *part.words, *more]
    with subprocess.Popen(command, cwd=ROOT, env=env) as process:
        try:
            # Else pytest was interrupted, did not begin, or did not end.
            return process.wait(None if math.isinf(seconds) else seconds) in (OK, FAILED, NO_TESTS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest ends its ranks, and says what has run
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()  # an interpreted kernel that CUDA has called goes on for minutes
    return False


def outcomes(part: Part) -> list[tuple[str, Result]]:
    """Return what came of each test: its outcome, or "with values" if it passed so alone."""
    later = {result.case: result for result in part.again().ended()} if part.failed() else {}
    found = []
    for result in part.ended():
        second = later.get(result.case, result)
        mended = result.outcome == "failed" != second.outcome
        found.append(("with values" if mended else result.outcome, second))
    return found


def page(chosen: Sequence[Part]) -> Iterator[str]:
    """Yield the record in Markdown."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    yield "# Everything of ours on the virtual GPU\n"
    yield f"`python3 noxfile.py -s virtual-gpu -- all --keep` on {time.strftime('%Y-%m-%d')} at"
    yield f"`{commit}`. Asserts about values that the device would have computed are left out. What"
    yield "failed so ran once more with values (`VGPU_COMPUTE=at-once`).\n"
    yield "| part | passed | skipped | passed or skipped with values | failed |"
    yield "| --- | --- | --- | --- | --- |"
    failures: list[Result] = []
    for part in chosen:
        results = outcomes(part)
        counts = Counter(kind for kind, _ in results)
        failures += [result for kind, result in results if kind == "failed"]
        if counts:
            figures = (counts[kind] for kind in ("passed", "skipped", "with values", "failed"))
            yield f"| {part.name} | {' | '.join(map(str, figures))} |"
        else:
            yield f"| {part.name} | no test has run | | | |"
    yield "\nWhat failed both times, with the first words of the reason:\n"
    for result in failures:
        reason = json.dumps(result.reason.splitlines()[0][:150]) if result.reason else "no reason"
        yield f"- `{result.case}`: {reason}"
    _, heading, rest = RECORD.read_text().partition(BY_HAND)
    yield f"\n{heading}{rest}".rstrip()


def main(words: Sequence[str]) -> int:
    """Run the parts that the words choose; return 1 if a test of them failed."""
    parser = argparse.ArgumentParser("noxfile.py -s virtual-gpu -- all", allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="PART", help="such as ddp-2; all if none")
    parser.add_argument("--share", default="1/1", help="1/4: the first quarter of the parts")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all together")
    parser.add_argument("--compute", default="none", choices=ORDERS, help="with values")
    parser.add_argument("--keep", action="store_true", help="write the record")
    options = parser.parse_args(words)
    place, _, count = options.share.partition("/")
    names = set(options.names)
    chosen = [part for part in parts(options.compute) if not names or part.name in names]
    mine = chosen[int(place) - 1 :: int(count)]
    if not mine:
        print(f"no part is called {' '.join(sorted(names))}; there are", end=" ")
        print(*(part.name for part in parts()))
        return 1
    end = time.monotonic() + 60 * options.minutes
    for part in mine:
        if (left := end - time.monotonic()) > 0:
            run(part, left)
        if part.order == "none" and part.failed() and (left := end - time.monotonic()) > 0:
            run(part.again(), left)
    if options.keep:
        RECORD.write_text("\n".join(page(parts())) + "\n")
    counts = Counter(kind for part in mine for kind, _ in outcomes(part))
    print(", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    return int(bool(counts["failed"] or not counts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
