"""Pytest plugin: `@pytest.mark.matrix` on a parametrised test.

    @pytest.mark.matrix                     # or matrix(where=..., limit=40, strength=2)
    @pytest.mark.ranks(1, 2, 4)             # an axis as well
    @pytest.mark.parametrize("strategy", [0, 1, 2, 3])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_strategies_agree(strategy, dtype, ranks): ...

The axes are the test's parameters. By default the cases of a pairwise cover run: every two values
that can meet do meet in one of them. `--full` runs the whole product and keeps a record, so that a
run that was cut off goes on. `--shard i/n` takes one of n parts of it, and without `--full` one of
n parts of the tests that were chosen. `where` is a predicate over the parameters, by name: cases
for which it is false don't exist. `limit` is the most cases that the cover may have. `strength=1`
is for axes that have nothing to do with each other: the cover has each value once, instead of each
pair. `few=3` is for cases that prove much the same and take long: the default run takes three cases
of the cover, evenly spaced.

`--results FILE` adds each test's result to a file as soon as the test has ended, and leaves out the
tests that the file says have ended without a failure: so a cell of the matrix goes on.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.matrix.cover import cover, in_shard
from tasks.matrix.record import Product, Record, Result, add_result, read_results

LIMIT = 40  # of a pairwise cover: CONTRIBUTING.md, "A test"
RECORD = pytest.StashKey[Record]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--full` and `--shard`."""
    group = parser.getgroup("lamina matrix")
    group.addoption(
        "--full", action="store_true", help="run whole products of tests marked `matrix`"
    )
    group.addoption("--shard", type=shard, metavar="I/N", help="part I of N of the tests")
    group.addoption(
        "--results",
        type=Path,
        metavar="FILE",
        help="add every test's result; leave out what passed",
    )


def shard(text: str) -> tuple[int, int]:
    """Parse `i/n`."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r}: write I/N with 1 <= I <= N, such as 3/50")
    return int(part), int(parts)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark; open the record."""
    line = (
        "matrix(where=None, limit=40, strength=2, few=None): a cover of the parameters, or --full"
    )
    config.addinivalue_line("markers", line)
    if config.getoption("--full"):
        config.stash[RECORD] = Record.of_tree(config.rootpath)
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder(config.stash[RECORD]))
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsFile(config.getoption("--results")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the cover of each matrix, or this shard of the whole product less what has ended."""
    groups: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("matrix"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    products: dict[str, Product] = {}
    for name, cases in groups.items():
        possible = [case for case in cases if exists(case)]
        cover = cover_of(name, possible)
        axes = {axis: len(set(column)) for axis, column in columns_of(possible).items()}
        products[name] = Product(axes, len(possible), len(cover))
        kept = [case for case in possible if wanted(config, case)] if full(config) else cover
        dropped |= set(cases) - set(kept)
    if full(config):
        config.stash[RECORD].add_products(products)
    part = config.getoption("--shard") or (1, 1)
    dropped |= {item for item in items if not in_shard(item.nodeid, *part)}
    dropped |= ended_before(config.getoption("--results"), items)
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]


def ended_before(file: Path | None, items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that a file of results says have ended without a failure."""
    last = read_results(file) if file else {}
    return {item for item in items if item.nodeid in last and last[item.nodeid].outcome != "failed"}


def full(config: pytest.Config) -> bool:
    """Whether whole products run."""
    return bool(config.getoption("--full"))


@pytest.fixture
def steps(pytestconfig: pytest.Config) -> int:
    """Optimizer steps that a test compares: 2 by default, 4 in whole products and slow tests.

    The second step reads all that the first has written: weights, state, buffers. The bit oracles
    of ddp and fsdp compare four or five steps in every run.
    """
    return 4 if full(pytestconfig) or pytestconfig.getoption("--slow", False) else 2


def wanted(config: pytest.Config, case: pytest.Function) -> bool:
    """Whether a case of the whole product is still to run, in this shard or another one."""
    return not config.stash[RECORD].settled(case.nodeid)


def settings(case: pytest.Function) -> dict[str, Any]:
    """Return the mark's keyword arguments."""
    mark = case.get_closest_marker("matrix")
    options = dict(mark.kwargs) if mark else {}
    if unknown := set(options) - {"where", "limit", "strength", "few"} or (mark and mark.args):
        raise pytest.UsageError(f"{case.nodeid}: @pytest.mark.matrix knows no {unknown}")
    return options


def exists(case: pytest.Function) -> bool:
    """Whether the mark's predicate allows the case; it is asked for the parameters it names."""
    where: Callable[..., bool] | None = settings(case).get("where")
    if where is None or not hasattr(case, "callspec"):
        return True
    names = inspect.signature(where).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
        return where(**case.callspec.params)
    return where(**{name: case.callspec.params[name] for name in names})


def columns_of(cases: list[pytest.Function]) -> dict[str, tuple[int, ...]]:
    """Return axis -> place of each case's value; names parametrised together are one axis."""
    columns: dict[tuple[int, ...], list[str]] = {}
    for name in cases[0].callspec.params if cases and hasattr(cases[0], "callspec") else ():
        # The objects that were listed: values need not be hashable or comparable.
        values = [id(case.callspec.params[name]) for case in cases]
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        columns.setdefault(tuple(places[value] for value in values), []).append(name)
    return {"+".join(names): column for column, names in columns.items()}


def cover_of(name: str, cases: list[pytest.Function]) -> list[pytest.Function]:
    """Choose the cases of the default run."""
    if not cases or not hasattr(cases[0], "callspec"):
        return cases
    along = zip(*columns_of(cases).values(), strict=True)
    asked = settings(cases[0])
    chosen = [cases[place] for place in cover(list(along), asked.get("strength", 2))]
    limit = asked.get("limit", LIMIT)
    if len(chosen) > limit:
        raise pytest.UsageError(
            f"{name}: its pairwise cover has {len(chosen)} cases, the limit is {limit}; give the "
            "two longest axes fewer values, or raise it with @pytest.mark.matrix(limit=...)"
        )
    few = min(asked.get("few", len(chosen)), len(chosen))
    return [chosen[place * len(chosen) // few] for place in range(few)]


def result_of(report: pytest.TestReport) -> Result | None:
    """Return a test's result from the report that decides it; None for the others."""
    if report.when != "call" and report.outcome == "passed":
        return None
    result = Result(report.nodeid, report.outcome, round(report.duration, 3))
    if report.skipped:
        skip = report.longrepr
        result.reason = skip[2] if isinstance(skip, tuple) else "expected to fail"
    elif report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        result.reason = crash.message if crash else str(report.longrepr).splitlines()[-1]
    return result


class ResultsFile:
    """Adds every test's result to a file, in the process that the user started."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one result as soon as the test has ended: a run that is cut off loses none."""
        if result := result_of(report):
            add_result(self.path, result)


class Recorder:
    """Keeps the result of every case, in the process that the user started (under xdist too)."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one result as soon as the case has ended."""
        result = result_of(report)
        if result and "matrix" in report.keywords:
            self.record.add(result)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how far the whole product is; write the page once all of it has ended."""
        wanted = sum(product.cases for product in self.record.products().values())
        line = f"whole product at {self.record.state}: {self.record.ended()} of {wanted} cases"
        if self.record.complete():
            page = self.record.root / "docs" / "matrix.md"
            page.write_text(self.record.page())
            line += f", written to {page.relative_to(self.record.root)}"
        terminalreporter.write_line(line)
