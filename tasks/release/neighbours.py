"""Whether packages of different releases work together: each new one beside the last released.

A combination is a layer and what lies beneath it, one of them new and the others as last released:
the new layer over released ones, and each released layer over the new one beneath it. A user gets
it with `pip install --upgrade` of one package, if the declared ranges allow it.

`python -m tasks.release.neighbours [LAYER...]` runs them in the environment at hand, and
`--keep` writes docs/records/neighbours.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tasks.bootstrap import ROOT
from tasks.clean_install import closure, gather, unpack
from tasks.release.archives import build, date_of
from tasks.release.packages import Package, Version, git, packages_of
from tasks.snippets import Job, run, snippets

PAGE = """\
# New packages beside released ones

Made by `python3 noxfile.py -s compat -- --keep` on {date} at commit `{commit}`; don't edit.
A release is a tag; a layer without one is unreleased, and there is nothing to try it beside.

| combination | verdict | reason |
| --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Combination:
    """A layer and all beneath it, lowest first; `new` is the one that is not yet released."""

    packages: tuple[Package, ...]
    new: str

    @property
    def top(self) -> Package:
        """Return the layer that is tried."""
        return self.packages[-1]

    def __str__(self) -> str:
        """Name the layer that is tried, and what is new."""
        words = [f"{p.layer} {p.version}{' (new)' * (p.layer == self.new)}" for p in self.packages]
        return " over ".join(reversed(words))

    def excluded(self) -> str:
        """Return which declared range forbids the combination, or ""."""
        versions = {package.layer: package.version for package in self.packages}
        for package in self.packages:
            for layer, wanted in package.requires().items():
                if not allows(wanted, versions[layer]):
                    return f"{package.layer} {package.version} wants {layer}{wanted}"
        return ""


@dataclass(frozen=True)
class Outcome:
    """How a combination went.

    Args:
        what: the combination.
        verdict: "works", "breaks", "excluded" (by a declared range) or "unreleased".
        detail: the traceback, or the range.
    """

    what: str
    verdict: str
    detail: str = field(default="", compare=False)


def allows(wanted: str, version: Version) -> bool:
    """Whether a range such as `>=0.1,<0.2` holds a version."""
    for sign, text in re.findall(r"(>=|<|==)([\d.]+)", wanted):
        bound = tuple(map(int, text.split(".")))
        same = version[: len(bound)]
        if not {">=": same >= bound, "<": same < bound, "==": same == bound}[sign]:
            return False
    return True


def beneath(layer: str, packages: Mapping[str, Package]) -> list[str]:
    """Return a layer and all that it needs, lowest first."""
    wanted, waiting = set(), [layer]
    while waiting:
        name = waiting.pop()
        wanted.add(name)
        waiting += [other for other in packages[name].requires() if other not in wanted]
    return [name for name in packages if name in wanted]


def combinations(
    new: Mapping[str, Package], released: Mapping[str, Package]
) -> Iterator[tuple[str, str, Combination | None]]:
    """Yield (layer tried, layer that is new, combination); None if something has no release."""
    for changed, package in new.items():
        last = package.last_release()
        if last and not package.changed_since(last):
            continue  # it is what was released
        for top in new:
            mixed = {**new, **released, changed: package}
            names = beneath(top, mixed)
            if changed in names and len(names) > 1:
                there = all(name == changed or name in released for name in names)
                packages = tuple(mixed[name] for name in names)
                yield top, changed, Combination(packages, changed) if there else None


def released_packages(root: Path, where: Path) -> dict[str, Package]:
    """Export every package as its last release has it; those without a release are left out."""
    found = {}
    for layer, package in packages_of(root).items():
        if version := package.last_release():
            found[layer] = package.export(where / layer, package.tag(version))
    return found


def try_all(root: Path, layers: Sequence[str] = ()) -> list[Outcome]:
    """Build the wheels that are needed and run every combination's smoke.

    The smoke is the top layer's own README: its program runs in a process whose import path is
    the standard library, torch with what it needs, and exactly these wheels.

    Args:
        root: the tree with the new packages; its tags are the releases.
        layers: the new layers to try; none means all.
    """
    with tempfile.TemporaryDirectory(prefix="lamina-neighbours-") as name:
        place = Path(name)
        new = packages_of(root)
        released = released_packages(root, place / "released")
        outcomes, jobs, waiting = [], [], []
        for top, changed, combination in combinations(new, released):
            if layers and changed not in layers:
                continue
            title = f"new {changed} beneath {top}" if top != changed else f"new {top}"
            if combination is None:
                outcomes.append(Outcome(title, "unreleased"))
            elif reason := combination.excluded():
                outcomes.append(Outcome(str(combination), "excluded", reason))
            else:
                paths = tuple(installed(package, place) for package in combination.packages)
                jobs.append(Job(tuple(snippets(combination.top.place / "README.md")), paths))
                waiting.append(str(combination))
        third_party = closure("torch", "numpy").values() if jobs else ()
        base = gather(third_party, place / "torch")
        for what, complaint in zip(waiting, run(jobs, base) if jobs else (), strict=True):
            outcomes.append(Outcome(what, "breaks" if complaint else "works", complaint))
        return outcomes


def installed(package: Package, place: Path) -> Path:
    """Build a package's wheel and unpack it as an installer would; return the directory."""
    where = place / "installed" / f"{package.layer}-{package.root.name}"
    if not where.exists():
        date = date_of(package) if (package.root / ".git").exists() else int(time.time())
        unpack(build(package.place, place / "wheels" / where.name, date, "wheel"), where)
    return where


def page(outcomes: Sequence[Outcome], root: Path) -> str:
    """Return the record as a page."""
    rows = []
    for outcome in outcomes:
        reason = (outcome.detail.strip().splitlines() or [""])[-1]
        rows.append(f"| {outcome.what} | {outcome.verdict} | {reason} |")
    commit = git(root, "rev-parse", "--short=12", "HEAD")
    return PAGE.format(date=time.strftime("%Y-%m-%d"), commit=commit, rows="\n".join(rows))


def main(words: Sequence[str]) -> int:
    """Run, print, and return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("layers", nargs="*", choices=[*packages_of(ROOT), []])
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args(words)
    outcomes = try_all(ROOT, options.layers)
    for outcome in outcomes:
        print(f"{outcome.verdict:10} {outcome.what}")
        if outcome.verdict in ("breaks", "excluded"):
            print("    " + outcome.detail.strip().replace("\n", "\n    "))
    if options.keep:
        path = ROOT / "docs" / "records" / "neighbours.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page(outcomes, ROOT))
        print(f"wrote {path.relative_to(ROOT)}")
    return int(any(outcome.verdict == "breaks" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
