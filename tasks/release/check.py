"""Which kind of version a layer's changes need since its last release, and who disagrees."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from tasks.bootstrap import ROOT
from tasks.release.packages import Kind, Package, Version


@dataclass(frozen=True)
class Verdict:
    """What a layer's changes since its last release need.

    Args:
        layer: the layer.
        released: its last release; None before the first.
        version: the one in its pyproject.toml.
        breaking: what breaks callers, a line each.
        added: new public names, a line each.
        complaints: what disagrees, a sentence each; empty if all is well.
        needs: the kind of version that is needed; None if nothing that a user gets has changed.
    """

    layer: str
    released: Version | None
    version: Version
    breaking: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    needs: Kind | None = None

    def table_row(self) -> str:
        """Return the verdict in one line."""
        since = f"since {self.released}" if self.released else "never released"
        counts = f"{len(self.breaking)} breaking, {len(self.added)} added"
        need = f"needs {self.needs}" if self.needs else "nothing to release"
        return f"{self.layer:12} {self.version!s:8} {since:16} {counts:24} {need}"


def needed(breaking: list[str], added: list[str], changed: list[str], last: Version) -> Kind | None:
    """Return the kind of version for such changes.

    Before 1.0 a minor version may break an interface and a patch version may add to it, as the
    ranges of the packages assume (`>=0.1,<0.2`).
    """
    if breaking:
        return "major" if last.major else "minor"
    if added and last.major:
        return "minor"
    return "patch" if added or changed else None


def interface_changes(
    package: Package, released: Version, griffe: Path
) -> tuple[list[str], list[str]]:
    """Return what broke and what was added in the layer's faces since that release."""
    with tempfile.TemporaryDirectory(prefix="lamina-faces-") as name:
        old = package.export(Path(name), package.tag(released)).place / "src"
        words = [package.layer, str(old), str(package.place / "src")]
        command = [str(griffe), "-m", "tasks.release.faces", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"griffe could not read {package.layer}:\n{done.stderr}")
    answer: dict[str, list[str]] = json.loads(done.stdout)
    return answer["breaking"], answer["added"]


def check(package: Package, griffe: Path) -> Verdict:
    """Compare a package with its last release.

    Args:
        package: the package in the tree.
        griffe: a Python that has griffe.
    """
    released, version = package.last_release(), package.version
    head, unreleased, lines = package.newest()
    complaints = []
    if head != str(version):
        complaints.append(f"CHANGELOG.md begins with {head}, pyproject.toml says {version}")
    if released is None:
        if not unreleased:
            complaints.append(f"CHANGELOG.md says that {head} is released; there is no tag of it")
        return Verdict(package.layer, None, version, [], [], complaints, "minor")
    changed = package.changed_since(released)
    breaking, added = interface_changes(package, released, griffe) if changed else ([], [])
    needs = needed(breaking, added, changed, released)
    if needs and version < released.next(needs):
        why = (breaking or added or changed)[0]
        complaints.append(
            f"the version is {version} and must be {released.next(needs)} or higher: {why}"
        )
    if needs and not (unreleased and lines):
        complaints.append("CHANGELOG.md has no unreleased version with a line about the change")
    if unreleased:
        complaints += untold(breaking, "\n".join(lines))
    return Verdict(package.layer, released, version, breaking, added, complaints, needs)


def untold(breaking: list[str], changelog: str) -> list[str]:
    """Complain of each broken name that the unreleased section does not have in backticks."""
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", changelog))))
    complaints = []
    for line in breaking:
        path = line.partition(":")[0]
        # `Class.__init__` is told by the class's name.
        names = [part for part in path.split(".") if part[0] != "_"][-2:]
        if not told & set(names):
            complaints.append(f"CHANGELOG.md does not name `{names[-1]}`, which broke ({line})")
    return complaints
