"""Pytest plugin: under pytest-xdist, modules that take longest begin first, so none is last.

A worker of `--dist loadscope` has a module to itself. One that takes a minute and begins last would
keep a single core busy while the others wait. How long modules take is in `durations.json`, which
`--keep-durations` writes. It need not be exact: only the order depends on it. `--shuffle` wins.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("durations.json")
UNKNOWN = 0.1  # seconds of a test in a module that the record does not have
LEAST = 3.0  # seconds of a module that it has


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--keep-durations`."""
    parser.getgroup("lamina").addoption(
        "--keep-durations",
        action="store_true",
        help=f"write tests/{RECORD.name}, by which workers of pytest-xdist begin with long modules",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Have the order of collection be that of the run; measure, if asked."""
    if hasattr(config.option, "loadscopereorder"):  # pytest-xdist would go by the number of tests
        config.option.loadscopereorder = False
    if config.getoption("--keep-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Stopwatch())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long modules first in a worker, whose modules come from a queue."""
    if hasattr(config, "workerinput") and not config.getoption("--shuffle"):
        items[:] = ordered(items, json.loads(RECORD.read_text()))


def ordered(items: list[pytest.Item], seconds: dict[str, float]) -> list[pytest.Item]:
    """Sort by how long a test's module takes; tests of a module keep their order."""
    tests = Counter(map(module_of, items))
    takes = {name: seconds.get(name, UNKNOWN * number) for name, number in tests.items()}
    return sorted(items, key=lambda item: (-takes[module_of(item)], module_of(item)))


def module_of(of: pytest.Item | pytest.TestReport) -> str:
    """Return the path of a test's module, from the root of the tree."""
    return of.nodeid.partition("::")[0]


class Stopwatch:
    """Adds up what the tests of each module take, with their fixtures."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of one test."""
        self.seconds[module_of(report)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the record, longest first; of modules that did not run it keeps what it has."""
        before = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        known = before | self.seconds
        root = session.config.rootpath
        lasting = {n: round(s, 1) for n, s in known.items() if s >= LEAST and (root / n).exists()}
        in_order = dict(sorted(lasting.items(), key=lambda entry: -entry[1]))
        RECORD.write_text(json.dumps(in_order, indent=1) + "\n")
