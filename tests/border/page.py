"""Writes docs/border.md: every use under every wrapper, torch's own beside ours.

python tests/border/page.py [--only PATTERN [--merge]] [--columns 3,ddp]

A run that is cut off (Ctrl-C, SIGTERM) merges the uses that it has finished into the page.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]


def main() -> None:
    options = _options()
    from border.case import COLUMNS
    from border.session import Border
    from border.uses import load_uses

    from lamina_testing.client import ForkServer

    columns = tuple(options.columns.split(",")) if options.columns else COLUMNS
    patterns = options.only.split(",")
    uses = {
        name: use
        for name, use in load_uses().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    }
    cells = [cell for use in uses.values() for cell in use.cells(columns)]
    if options.cover:
        from border.test_border import USES, cover

        cells = [
            cell
            for number, use in enumerate(USES.values())
            if use.name in uses and not use.slow
            for cell in cover(number, use.cells())
        ]
    server = ForkServer()
    found = {}

    def say(cell, answer):
        found[cell] = answer
        if options.all or not answer.good:
            print(f"{' '.join(cell):60} {answer.verdict:10} {answer.detail}", flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Border(server).run(cells, say)
    except KeyboardInterrupt:
        print(f"cut off after {len(found)} of {len(cells)} cells")
    finally:
        server.close()
    if len(found) < len(cells):
        begun = {cell[0] for cell in cells if cell not in found}
        uses = {name: use for name, use in uses.items() if name not in begun}
        found = {cell: answer for cell, answer in found.items() if cell[0] in uses}
        options.merge |= options.only == "*"
    if options.answers:
        lines = [
            json.dumps([*cell, answer.verdict, answer.detail]) for cell, answer in found.items()
        ]
        options.answers.write_text("".join(f"{line}\n" for line in lines))
    good = sum(answer.good for answer in found.values())
    print(f"{len(uses)} uses, {len(found)} cells, {good} right or refused")
    if options.columns or options.cover:
        return
    from border.table import page, page_with

    written = ROOT / "docs/border.md"
    if options.merge:
        written.write_text(page_with(written.read_text(), load_uses(), found))
    elif options.only == "*":
        written.write_text(page(uses, found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="uses whose name matches one of these")
    parser.add_argument("--merge", action="store_true", help="write them into the page")
    parser.add_argument("--columns", help="some of the columns, with commas between")
    parser.add_argument("--cover", action="store_true", help="the cells of the default tests")
    parser.add_argument("--answers", type=Path, help="a file for what was found, a line per cell")
    parser.add_argument("--all", action="store_true", help="print good cells too")
    return parser.parse_args()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path[:0] = [str(HERE.parents[1]), str(ROOT)]
    main()
