"""Pytest plugin: `--sample 400:SEED` runs about so many of the tests, others with each seed.

A test is chosen with its module, since a module's start is what costs, and of a large module some
tests are chosen, so that many modules have their turn.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

PER_MODULE = 24
FEWEST = 5  # tests of a module, in the mean of some modules


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--sample`."""
    parser.getgroup("lamina").addoption(
        "--sample",
        metavar="COUNT:SEED",
        help="run at least COUNT of the tests, chosen by SEED, such as a commit: 400:1a2b3c",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules that come late in the draw: importing all takes longer than the sample."""
    asked = config.getoption("--sample")
    if not asked or not fnmatch.fnmatch(collection_path.name, "test_*.py"):
        return None
    count, _, seed = asked.partition(":")
    folders = tuple(config.rootpath / folder for folder in config.getini("testpaths"))
    return collection_path not in early(config.rootpath, folders, int(count), seed) or None


@functools.cache
def early(root: Path, folders: tuple[Path, ...], count: int, seed: str) -> set[Path]:
    """Return the modules that come first in the draw; their tests are several times as many."""
    modules = [path for folder in folders for path in folder.rglob("test_*.py")]
    modules.sort(key=lambda path: drawn(path.relative_to(root).as_posix(), seed))
    return {*modules[: max(20, count // FEWEST)]}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all tests that are not in the sample, the last of all that deselect."""
    if asked := config.getoption("--sample"):
        count, _, seed = asked.partition(":")
        chosen = sample([item.nodeid for item in items], int(count), seed)
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in chosen])
        items[:] = [item for item in items if item.nodeid in chosen]


def sample(names: Sequence[str], count: int, seed: str) -> set[str]:
    """Return at least `count` of the names, or all: some of a module, as many modules as needed."""
    modules: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: drawn(name, seed)):
        modules.setdefault(name.partition("::")[0], []).append(name)
    chosen: set[str] = set()
    rounds = 1 + max(map(len, modules.values()), default=0) // PER_MODULE
    for turn in range(rounds):  # one is enough, unless nearly all tests are asked for
        for module in sorted(modules, key=lambda name: drawn(name, seed)):
            if len(chosen) >= count:
                return chosen
            chosen.update(modules[module][turn * PER_MODULE :][:PER_MODULE])
    return chosen


def drawn(name: str, seed: str) -> bytes:
    """Return what a name draws: the order of a lot."""
    return hashlib.sha256(f"{seed} {name}".encode()).digest()
