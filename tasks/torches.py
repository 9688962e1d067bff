"""Which torch the tree supports, read from the packages' own metadata.

Imports the standard library alone: nox's environment has nothing else.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT


def requirements(root: Path = ROOT) -> Iterator[str]:
    """Yield what the packages require of others, extras included."""
    for layer in LAYERS:
        path = root / "packages" / layer / "pyproject.toml"
        project = tomllib.loads(path.read_text())["project"] if path.exists() else {}
        yield from project.get("dependencies", ())
        for extra in project.get("optional-dependencies", {}).values():
            yield from extra


def range_of_tree(root: Path = ROOT) -> str:
    """Return the range of torch that every layer declares, such as ">=2.11,<2.16"."""
    ranges = {
        text.removeprefix("torch") for text in requirements(root) if text.startswith("torch>")
    }
    if len(ranges) != 1:
        raise ValueError(f"the layers declare different ranges of torch: {sorted(ranges)}")
    return ranges.pop()


def supported(root: Path = ROOT) -> list[str]:
    """Return the minor versions of torch in that range, such as ["2.11", "2.12"]."""
    match = re.fullmatch(r">=(\d+)\.(\d+),<(\d+)\.(\d+)", range_of_tree(root))
    if match is None or match[1] != match[3]:
        raise ValueError(f"torch{range_of_tree(root)}: write >=X.A,<X.B")
    major, low, _, high = map(int, match.groups())
    return [f"{major}.{minor}" for minor in range(low, high)]


def in_range(version: str, root: Path = ROOT) -> bool:
    """Whether a version of torch is one that the packages declare."""
    return ".".join(version.split(".")[:2]) in supported(root)


def lowest_bounds(root: Path = ROOT) -> tuple[str, ...]:
    """Return constraints that hold every requirement of others to its lowest version."""
    found = {}
    for text in requirements(root):
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?>=([\d.]+)", text)
        if match and not match[1].startswith("lamina-") and match[1] != "torch":
            found[match[1]] = f"{match[1]}=={match[2]}.*"
    return tuple(found[name] for name in sorted(found))
