"""The pages of the matrix: Markdown, HTML and JUnit, made from the last run of every cell."""

from __future__ import annotations

import html
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from xml.etree import ElementTree

from tasks.bootstrap import LAYERS
from tasks.matrix.cells import BACKENDS, WORLDS, Planned
from tasks.matrix.history import Run, save
from tasks.matrix.running import Ended, count_cells

COLUMNS = tuple((backend, world) for backend in BACKENDS for world in WORLDS)
MADE_BY = "Made by `python3 noxfile.py -s matrix -- --keep`; don't edit."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def in_cell(run: Run | None) -> str:
    """Return what a run shows in the grid."""
    if run is None:
        return "never"
    mark = "virtual: " if run.is_virtual else ""
    return f"{mark}{run.summary()}, {run.seconds:.0f} s" if run.counts else "no tests"


def grids(runs: Sequence[Run]) -> Iterable[str]:
    """Yield one table of layers x (backend, world) per minor version of torch."""
    for torch in sorted({run.cell.torch for run in runs}, key=version_order):
        last = {
            (r.cell.layer, r.cell.backend, r.cell.world): r for r in runs if r.cell.torch == torch
        }
        yield f"## torch {torch}\n\n" + table(
            ["layer", *(f"{backend} {world}" for backend, world in COLUMNS)],
            [
                [layer, *(in_cell(last.get((layer, *column))) for column in COLUMNS)]
                for layer in LAYERS
            ],
        )


def version_order(text: str) -> tuple[int, ...]:
    """Return the key that sorts 2.9 before 2.10."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def never_ran(runs: Iterable[Run], planned: Iterable[Planned]) -> str:
    """Return which cells no run is known of: by reason, or "could run here"."""
    ran = {run.cell for run in runs}
    missing = [entry for entry in planned if entry.cell not in ran]
    reasons = Counter(entry.refusal or "could have run here" for entry in missing)
    lines = [f"- {count_cells(count)}: {reason}\n" for reason, count in reasons.most_common()]
    return "## Never ran\n\n" + ("".join(lines) or "Every cell has run.\n")


def markdown(runs: Sequence[Run], planned: Sequence[Planned]) -> str:
    """Return the page: the grids, the last run of every cell, and what never ran."""
    rows = [
        [
            f"{run.cell.layer} {run.cell.backend} {run.cell.world}",
            run.versions["torch"],
            run.versions.get("triton", "") or "none",
            run.summary(),
            f"{run.seconds:.0f} s",
            run.date,
            f"`{run.commit}`",
            f"{run.machine}, Python {run.versions['python']}",
        ]
        for run in runs
    ]
    head = ["cell", "torch", "triton", "tests", "time", "last run", "commit", "machine"]
    return "\n".join(
        [
            "# The cells of the matrix\n",
            "Each layer's own tests on one backend, world size and version of torch.",
            f"{MADE_BY}",
            "Cells with the mark `virtual` ran on the [virtual GPU](../virtual-gpu.md), by",
            "`python3 noxfile.py -s virtual-gpu -- tests --keep`.\n",
            f"Written on {time.strftime('%Y-%m-%d')}. A commit with `+` had changes of its own.\n",
            *grids(runs),
            never_ran(runs, planned),
            "## The last run of every cell\n",
            table(head, rows),
        ]
    )


def compatibility(runs: Sequence[Run]) -> str:
    """Return the table of layers over versions of torch, triton and Transformer Engine."""
    columns = sorted({with_what(run) for run in runs})
    body = []
    for layer in LAYERS:
        row = [layer]
        for column in columns:
            mine = [r for r in runs if r.cell.layer == layer and with_what(r) == column]
            counts: Counter[str] = sum((Counter(run.counts) for run in mine), Counter())
            worlds = sorted(
                {
                    f"{'virtual ' * r.is_virtual}{r.cell.backend} {r.cell.world}"
                    for r in mine
                    if any(r.counts.values())
                }
            )
            verdict = (
                f"{counts['failed']} failed" if counts["failed"] else f"{counts['passed']} passed"
            )
            row.append(f"{verdict} on {', '.join(worlds)}" if worlds else "never run")
        body.append(row)
    head = [
        "layer",
        *(f"torch {t}<br>triton {tr}<br>Transformer Engine {te}" for t, tr, te in columns),
    ]
    return (
        "# What was run with what\n\n"
        "Versions beside which a layer's tests have run, from the records in [cells](cells.md).\n"
        f"{MADE_BY}\n\n" + table(head, body)
    )


def with_what(run: Run) -> tuple[str, str, str]:
    """Return the versions that make a column: torch's, triton's and Transformer Engine's."""
    names = ("torch", "triton", "transformer_engine")
    torch, triton, engine = (run.versions.get(name, "") or "none" for name in names)
    return torch, triton, engine


# ------------------------------------------------------------------------ other forms

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border: 1px solid #ccc; padding: .3rem .5rem; text-align: left }
th { background: #f3f3f3 }
td.failed { background: #fbd5d5 }
td.passed { background: #dcf3dc }
td.never { color: #999 }
"""


def to_html(page: str) -> str:
    """Return a page of this module as one HTML file that needs nothing else."""
    out: list[str] = []
    rows: list[list[str]] = []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
            continue
        if rows:
            out.append(html_table(rows))
            rows = []
        if line.startswith("#"):
            level = len(line) - len(line.lstrip("#"))
            out.append(f"<h{level}>{html.escape(line.lstrip('# '))}</h{level}>")
        elif line:
            out.append(f"<p>{html.escape(line)}</p>")
    title = html.escape(page.splitlines()[0].lstrip("# "))
    head = f"<meta charset='utf-8'><title>{title}</title><style>{STYLE}</style>"
    return (
        f"<!doctype html><html><head>{head}</head><body>\n" + "\n".join(out) + "\n</body></html>\n"
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are coloured by how their tests ended."""
    head, _, *body = rows

    def kind(text: str) -> str:
        if "failed" in text:
            return " class='failed'"
        if "passed" in text:
            return " class='passed'"
        return " class='never'" if text in ("never", "never run", "no tests") else ""

    def line(cells: Sequence[str], tag: str, kind: Callable[[str], str]) -> str:
        escaped = ((cell, html.escape(cell).replace("&lt;br&gt;", "<br>")) for cell in cells)
        return (
            "<tr>" + "".join(f"<{tag}{kind(raw)}>{text}</{tag}>" for raw, text in escaped) + "</tr>"
        )

    lines = [line(head, "th", lambda _: ""), *(line(row, "td", kind) for row in body)]
    return "<table>" + "\n".join(lines) + "</table>"


def junit(ended: Sequence[Ended]) -> str:
    """Return the run as JUnit's XML: a suite per cell, a skipped case where one did not run."""
    top = ElementTree.Element("testsuites", name="lamina matrix")
    for entry in ended:
        tests = entry.files.tests() if entry.files and entry.run else []
        suite = ElementTree.SubElement(top, "testsuite", name=entry.cell.name)
        for result in tests:
            seconds = f"{result.seconds:.3f}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=entry.cell.name, name=result.case, time=seconds
            )
            if result.outcome != "passed":
                tag = "skipped" if result.outcome == "skipped" else "failure"
                ElementTree.SubElement(case, tag, message=printable(result.reason))
        if not entry.run:
            case = ElementTree.SubElement(suite, "testcase", classname="cell", name=entry.cell.name)
            tag, message = ("error", entry.broken) if entry.broken else ("skipped", entry.reason)
            ElementTree.SubElement(case, tag, message=printable(message))
        counts = Counter(child.tag for case in suite for child in case)
        suite.set("tests", str(len(suite)))
        for name, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(name, str(counts[tag]))
    ElementTree.indent(top)
    return "<?xml version='1.0' encoding='utf-8'?>\n" + ElementTree.tostring(top, "unicode") + "\n"


def printable(text: str) -> str:
    """Return a text without the characters that XML forbids."""
    return "".join(c for c in text if c in "\t\n\r" or ord(c) >= 0x20)


def write(
    root: Path, runs: Sequence[Run], ended: Sequence[Ended], planned: Sequence[Planned], keep: bool
) -> list[Path]:
    """Write the pages, into the repository too if they are to be kept; return where they are.

    Args:
        root: the tree.
        runs: the last run of every cell.
        ended: the cells of this run.
        planned: every cell that there is.
        keep: whether `docs/records/` gets the runs and their pages.
    """
    page = markdown(runs, planned)
    local = root / ".matrix"
    local.mkdir(exist_ok=True)
    files = {
        local / "cells.md": page,
        local / "cells.html": to_html(page),
        local / "junit.xml": junit(ended),
    }
    for path, text in files.items():
        path.write_text(text)
    return [*files, *(write_records(root, runs, planned) if keep else ())]


def write_records(root: Path, runs: Sequence[Run], planned: Sequence[Planned]) -> list[Path]:
    """Write the runs that are kept, and their pages; return the pages' places."""
    records = root / "docs" / "records"
    save(records / "cells.json", runs)
    pages = {"cells.md": markdown(runs, planned), "compatibility.md": compatibility(runs)}
    for name, text in pages.items():
        (records / name).write_text(text)
    return [records / name for name in pages]
