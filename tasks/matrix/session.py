"""The tasks `matrix` and its forms."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable

import nox

from tasks.bootstrap import HOUSE, LAYERS, ROOT
from tasks.cores import workers
from tasks.environment import CHILD_ENV, SHARED, pytest, run, task
from tasks.matrix.cells import Devices, Planned, Torch, choose, plan
from tasks.matrix.history import load, merge
from tasks.matrix.page import write
from tasks.matrix.running import Bench, Progress, clean_environment
from tasks.torches import supported

RECORD = ROOT / "docs" / "records" / "cells.json"


def options() -> argparse.ArgumentParser:
    """Return the parser of what stands behind `-s matrix --`; the rest goes to pytest."""
    parser = argparse.ArgumentParser("noxfile.py -s matrix --", allow_abbrev=False)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--installed", metavar="LAYER", choices=LAYERS)
    parser.add_argument("--shard", metavar="I/N", default="1/1")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--again", action="store_true")
    return parser


@task(default=False)
def matrix(session: nox.Session) -> None:
    """Each layer's tests on every backend, world size and torch that this machine has; resumes."""
    known, rest = options().parse_known_args(session.posargs)
    if known.installed:
        run(session, "python", "-m", "tasks.clean_install", *session.posargs)
    elif known.full:
        # Every case of every matrix, not the pairwise cover, and the slow ones among them. Writes
        # docs/matrix.md once complete.
        words = [*workers("worksteal"), "--slow", *session.posargs]
        pytest(session, "-m", "matrix", *words, success_codes=(0, 5))
    else:
        cells(session, known, rest)


def cells(session: nox.Session, known: argparse.Namespace, rest: list[str]) -> None:
    """Plan, run and report the cells."""
    torches = environments()
    devices = Devices.find(SHARED.python)
    part, _, parts = known.shard.partition("/")
    everything = all_cells(devices, torches)
    try:
        words, others = split(rest, everything)
        planned = choose(everything, words, (int(part), int(parts)))
    except ValueError as error:
        session.error(str(error))
    progress = Progress()
    for minor, torch in torches.items():
        versions = ", ".join(f"{name} {value or 'none'}" for name, value in torch.versions.items())
        progress.tell(f"torch {minor}: {torch.python} ({versions})")
    progress.tell(f"this machine: {devices}")
    if known.plan:
        for entry in planned:
            progress.tell(f"{entry.cell.name}: {entry.refusal or 'can run'}")
        return
    environment = clean_environment((*CHILD_ENV, "LAMINA_CLOSING_LINE"))
    bench = Bench(ROOT, devices, torches, environment, others, known.again)
    ended = bench.run_all(planned, progress)
    # Options of pytest may have left tests out: such runs say nothing about a cell.
    new = [entry.run for entry in ended if entry.run and not others]
    for path in write(ROOT, merge(load(RECORD), new), ended, everything, known.keep):
        progress.tell(f"wrote {path.relative_to(ROOT)}")
    close(planned, sum(entry.failed for entry in ended))
    if any(entry.failed for entry in ended):
        session.error("cells that failed: " + ", ".join(e.cell.name for e in ended if e.failed))


def all_cells(devices: Devices, torches: Iterable[str]) -> list[Planned]:
    """Return the cells of all layers, on devices and with environments of versions of torch."""
    with_tests = [layer for layer in LAYERS if (ROOT / "packages" / layer / "tests").is_dir()]
    return plan(with_tests, devices, torches, supported())


def split(rest: list[str], planned: list[Planned]) -> tuple[list[str], list[str]]:
    """Part the words that name cells from the options of pytest and their values.

    Raises ValueError for a word that is neither, such as a mistyped layer.
    """
    values = {part for entry in planned for part in entry.cell.name.split("-")}
    cells: list[str] = []
    others: list[str] = []
    for before, word in zip(["", *rest], rest, strict=False):
        if set(word.split("-")) <= values:
            cells.append(word)
        elif word.startswith("-") or before.startswith("-"):
            others.append(word)
        else:
            raise ValueError(f"{word!r} names no cell; write for example fsdp-nccl-8 or gloo-2")
    return cells, others


def environments() -> dict[str, Torch]:
    """Return minor version of torch -> the environment in `.nox/` that has it."""
    places = [SHARED.python, *sorted(HOUSE.glob("torch-*/bin/python"))]
    found = [torch for place in places if place.exists() and (torch := Torch.of(place))]
    return {torch.minor: torch for torch in reversed(found)}


def close(planned: list[Planned], failed: int) -> None:
    """Leave the closing line that noxfile.py prints last."""
    refused = sum(bool(entry.refusal) for entry in planned)
    line = f"{len(planned) - refused - failed} cells passed, {failed} failed, {refused} skipped"
    if where := os.environ.get("LAMINA_CLOSING_LINE"):
        with open(where, "a") as handle:
            handle.write(f"{line}\n")
    else:
        print(line, flush=True)


def form(words: str, text: str) -> None:
    """List a form of `matrix`: `-l` shows the line, and by its whole name the form runs too."""

    def session(session: nox.Session) -> None:
        session.posargs[:0] = words.split()
        matrix.func(session)

    session.__doc__ = text
    task(default=False, name=f"matrix -- {words}")(session)


form_lines = {
    "fsdp-nccl-8 gloo-2": "These cells; `--plan` says which can run here, and why others cannot.",
    "--keep": "Keep the last run of every cell as a record, docs/records/cells.md.",
    "--again": "Run cells again that have passed on these sources.",
    "--shard 1/4": "The first quarter of the cells, or with --full of the cases.",
    "--full": "Every case of every test marked `matrix`; resumable; writes docs/matrix.md.",
    "--installed fsdp": "A layer's tests on its built wheel and those beneath, without the tree.",
}
for words, text in form_lines.items():
    form(words, text)
