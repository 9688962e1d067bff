"""Runs torch's own tests of FSDP2, DDP and checkpoints over Lamina, on gloo, and says what holds.

`python -m tasks.peers.running CHECKOUT [--suite fsdp2 ddp dcp] [--file TEXT] [--ranks N] [--keep]`,
in `.nox/env`. CHECKOUT is a source tree of PyTorch that the user has (a clone, or Debian's
source package unpacked). Its tests are read, rewritten into `.matrix/peers/`, and run twice: over
torch itself, which says what can be judged on this machine, and over Lamina. A run goes on where
the last one ended.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT
from tasks.matrix.history import commit_of, state_of
from tasks.matrix.record import Result, read_results
from tasks.peers.judge import VERDICTS, Judgement, by_verdict, judge, one_line, reasons
from tasks.peers.substitute import internal_tests, substitute, wraps

SHIMS = Path(__file__).parent / "shims"
TESTS = "test/distributed"
SUITES = ("fsdp2", "ddp", "dcp")
UNEXPLAINED = ("refused", "absent", "breaks")  # verdicts that want a reason and a page
# distributed_test.py, which comes with torch, holds DDP's tests among hundreds of others.
DDP_RUNNER = """\
import os
os.environ.setdefault("INIT_METHOD", "tcp://")
from {copy} import DistributedTest, TestDistBackend

class TestDDP(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

for name in dir(TestDDP):
    if name.startswith("test") and "ddp" not in name and "DistributedDataParallel" not in name:
        setattr(TestDDP, name, None)
"""


PAGE = """\
# torch's own tests, over Lamina

Made by `python3 noxfile.py -s peers -- CHECKOUT --keep`; don't edit. Tests of {checkout}, run on
gloo with {ranks} ranks at commit `{commit}` on {date}.

| suite | tests | {heads} |
| --- | --- | {dashes} |
{rows}
{parts}"""


@dataclass(frozen=True)
class TestFile:
    """One file of torch's tests: its suite, and where it is."""

    __test__ = False  # pytest: no class of tests

    suite: str
    path: Path

    @property
    def name(self) -> str:
        """Return the file's name without its ending."""
        return self.path.stem


def files_of(checkout: Path, suite: str) -> list[TestFile]:
    """Return the files of a suite. Raises ValueError if the checkout has none of them."""
    tests = checkout / TESTS
    if suite == "ddp":
        found = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
        paths = [Path(found.origin)] if found and found.origin else []
    elif suite == "fsdp2":
        folders = (tests / "_composable" / "fsdp", tests / "fsdp2")
        paths = [path for place in folders for path in sorted(place.glob("test_*.py"))]
    else:
        every = sorted((tests / "checkpoint").rglob("test_*.py"))
        paths = [path for path in every if wraps(path.read_text())]
    if not paths:
        raise ValueError(f"{checkout} has no tests of {suite}: is it a source tree of PyTorch?")
    return [TestFile(suite, path) for path in paths]


def run_file(file: TestFile, place: Path, ranks: int, *, lamina: bool) -> dict[str, Result]:
    """Run a file's tests that have not yet run; return how each has ended, by "Class::name"."""
    place = place / ("lamina" if lamina else "torch")
    place.mkdir(parents=True, exist_ok=True)
    results = place / f"{file.name}.jsonl"
    text = substitute(file.path.read_text(), lamina=lamina)
    target = place / f"{file.name}.py"
    if file.suite == "ddp":
        (place / "copy_of_distributed_test.py").write_text(text)
        text = DDP_RUNNER.format(copy="copy_of_distributed_test")
        target = place / "test_ddp.py"
    target.write_text(text)
    for folder in ("barrier", "wrapped"):
        (place / folder).mkdir(exist_ok=True)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, (ROOT, SHIMS, place)), *beside()]),
        "LAMINA_PEER_RANKS": str(ranks),
        "LAMINA_PEER": "1" if lamina else "",
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(place),  # of torch's barriers; its own runner sets another one
        "LAMINA_PEER_WRAPPED": str(place / "wrapped"),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "90",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        str(place),
        "--confcutdir",
        str(place),
    ]
    command += ["-c", os.devnull]
    command += ["-p", "tasks.matrix.plugin", "-p", "no:cacheprovider", "--results", str(results)]
    with open(place / f"{file.name}.log", "w") as log:
        words = [*command, "--import-mode=prepend", target.name]
        subprocess.run(words, cwd=place, env=env, stdout=log, stderr=log)
    return {case.partition("::")[2]: result for case, result in read_results(results).items()}


def beside() -> list[str]:
    """Return where the layers of this tree are, and the packages that only torch's tests need."""
    layers = [str(ROOT / "packages" / layer / "src") for layer in LAYERS]
    return [*layers, *filter(None, [os.environ.get("LAMINA_PEER_PACKAGES")])]


def judge_file(file: TestFile, place: Path, ranks: int) -> Iterator[Judgement]:
    """Run a file both ways and judge each of its tests."""
    over_torch = run_file(file, place, ranks, lamina=False)
    if not over_torch:
        why = one_line((place / "torch" / f"{file.name}.log").read_text())
        yield Judgement(f"{file.name}::*", "not judged", f"over torch itself no test ran: {why}")
        return
    over_lamina = run_file(file, place, ranks, lamina=True)
    internal = internal_tests(file.path.read_text()) if file.suite != "ddp" else set()
    wrapped = {path.name for path in (place / "lamina" / "wrapped").glob("*")}
    for test in sorted({*over_torch, *over_lamina}):
        aside = "it checks torch's internals" if test in internal else ""
        ended = over_lamina.get(test)
        if ended is not None and ended.outcome == "passed" and test not in wrapped:
            aside = aside or "it wraps no model in what Lamina has"
        yield judge(test, over_torch.get(test), ended, reasons(), aside)


def page(judged: dict[str, list[Judgement]], checkout: str, ranks: int) -> str:
    """Return the record."""
    rows, parts = [], []
    for suite, judgements in judged.items():
        counts = Counter(j.verdict for j in judgements)
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        rows.append(f"| {suite} | {len(judgements)} | {numbers} |")
        for verdict, those in by_verdict(judgements).items():
            if verdict != "holds" and those:
                parts.append(f"\n## {suite}: {verdict}\n\n{VERDICTS[verdict].capitalize()}.\n\n")
                parts += [f"- `{j.test}`: {linked(j)}\n" for j in those]
    return PAGE.format(
        checkout=checkout,
        ranks=ranks,
        commit=commit_of(ROOT),
        date=time.strftime("%Y-%m-%d"),
        heads=" | ".join(VERDICTS),
        dashes=" | ".join("---" for _ in VERDICTS),
        rows="\n".join(rows),
        parts="".join(parts),
    )


def linked(judgement: Judgement) -> str:
    """Return why, with its link as seen from docs/records/."""
    why = judgement.why.replace("|", "/").replace("<", "&lt;")
    return f"{why} ([docs](../{judgement.link}))" if judgement.link else why


def main(words: Sequence[str]) -> int:
    """Run, print a line per test, and end with the counts."""
    parser = argparse.ArgumentParser("noxfile.py -s peers --")
    parser.add_argument("checkout", type=Path, help="a source tree of PyTorch")
    parser.add_argument("--suite", choices=SUITES, nargs="+", default=SUITES)
    parser.add_argument("--file", default="", help="only files whose name has this in it")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to pretend (default: 2)")
    parser.add_argument("--keep", action="store_true", help="write docs/records/peers-SUITE.md")
    options = parser.parse_args(words)
    try:
        files = [file for suite in options.suite for file in files_of(options.checkout, suite)]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    version = options.checkout / "version.txt"
    name = f"PyTorch {version.read_text().strip()}" if version.exists() else options.checkout.name
    judged: dict[str, list[Judgement]] = {suite: [] for suite in options.suite}
    tree = state_of(ROOT, ["packages", "tasks/peers"])
    for file in files:
        if options.file not in file.name:
            continue
        key = hashlib.sha256(file.path.read_bytes() + f"{tree}{options.ranks}".encode())
        place = ROOT / ".matrix" / "peers" / f"{file.name}-{key.hexdigest()[:12]}"
        for judgement in judge_file(file, place, options.ranks):
            judged[file.suite].append(judgement)
            link = f" (docs/{judgement.link})" if judgement.link else ""
            print(f"{judgement.verdict:10} {judgement.test}: {judgement.why}{link}", flush=True)
    for suite, judgements in judged.items():
        counts = Counter(j.verdict for j in judgements)
        print(f"{suite}: " + ", ".join(f"{counts[v]} {v}" for v in VERDICTS))
    open_ones = [j for js in judged.values() for j in js if j.verdict in UNEXPLAINED and not j.link]
    print(
        f"{len(open_ones)} refused, absent or breaking without a reason in tasks/peers/reasons.toml"
    )
    for suite, judgements in judged.items() if options.keep else ():
        path = ROOT / "docs" / "records" / f"peers-{suite}.md"
        path.parent.mkdir(exist_ok=True)
        source = f"PyTorch {version_of('torch')}" if suite == "ddp" else name
        path.write_text(page({suite: judgements}, source, options.ranks))
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
