"""A package of the tree as releases see it: version, ranges, changelog, last release.

A release is a tag `lamina-LAYER-vX.Y.Z`; nothing else is. Before a layer's first tag it has no
release, and the version in its `pyproject.toml` is the one that the first will have.
"""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks.bootstrap import LAYERS

# `extractall` refuses what would lie outside its directory. Before Python 3.11.4 it cannot, and all
# archives here were made by ourselves a moment before.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

Kind = Literal["major", "minor", "patch"]


class Version(NamedTuple):
    """A version of three numbers."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read X.Y.Z. Raises ValueError for anything else."""
        match = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", text)
        if match is None:
            raise ValueError(f"{text!r} is no version of three numbers, such as 0.2.1")
        return cls(*map(int, match.groups()))

    def next(self, kind: Kind) -> Version:
        """Return the version that follows."""
        if kind == "major":
            return Version(self.major + 1, 0, 0)
        if kind == "minor":
            return Version(self.major, self.minor + 1, 0)
        return Version(self.major, self.minor, self.patch + 1)

    @property
    def range(self) -> str:
        """Return the range of versions with this interface, as a requirement has it."""
        if self.major:
            return f">={self.major}.{self.minor},<{self.major + 1}"
        return f">=0.{self.minor},<0.{self.minor + 1}"

    def __str__(self) -> str:
        """Return X.Y.Z."""
        return f"{self.major}.{self.minor}.{self.patch}"


def git(root: Path, *words: str) -> str:
    """Return what git prints. Raises RuntimeError with git's complaint."""
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"git {' '.join(words)} failed in {root}: {done.stderr.strip()}")
    return done.stdout.strip()


@dataclass(frozen=True)
class Package:
    """One layer's package in a tree."""

    root: Path
    layer: str

    @property
    def place(self) -> Path:
        """Return the package's directory."""
        return self.root / "packages" / self.layer

    @property
    def project(self) -> Path:
        """Return the path of pyproject.toml."""
        return self.place / "pyproject.toml"

    @property
    def changelog(self) -> Path:
        """Return the path of CHANGELOG.md."""
        return self.place / "CHANGELOG.md"

    @property
    def version(self) -> Version:
        """Return the version in pyproject.toml."""
        return Version.parse(tomllib.loads(self.project.read_text())["project"]["version"])

    def requires(self) -> dict[str, str]:
        """Return layer -> the range in which this package needs it, extras left out."""
        needs = tomllib.loads(self.project.read_text())["project"].get("dependencies", ())
        found = (re.fullmatch(r"lamina-(\w+)(\S*)", text) for text in needs)
        return {match[1]: match[2] for match in found if match}

    def set_version(self, version: Version) -> None:
        """Write the version into pyproject.toml."""
        self._rewrite(r'(?m)^version = "[^"]*"', f'version = "{version}"')

    def set_range(self, layer: str, version: Version) -> bool:
        """Require `layer` in that version's range; return whether anything changed."""
        before = self.project.read_text()
        if f"lamina-{layer}>" in before:
            self._rewrite(rf'"lamina-{layer}>[^"]*"', f'"lamina-{layer}{version.range}"')
        return self.project.read_text() != before

    def _rewrite(self, pattern: str, text: str) -> None:
        changed, count = re.subn(pattern, text, self.project.read_text())
        if not count:
            raise ValueError(f"{self.project} has nothing that matches {pattern}")
        self.project.write_text(changed)

    # -------------------------------------------------------------------- the changelog

    def newest(self) -> tuple[str, bool, list[str]]:
        """Return the newest version in the changelog, whether it is unreleased, and its lines.

        Raises ValueError if the changelog does not begin with a version.
        """
        heads = list(self._heads())
        if not heads:
            raise ValueError(f"{self.changelog} has no line such as `## 0.1.0 (unreleased)`")
        text = self.changelog.read_text()
        end = heads[1].start() if len(heads) > 1 else len(text)
        lines = [line for line in text[heads[0].end() : end].splitlines() if line.strip()]
        return heads[0][1], heads[0][2] == "unreleased", lines

    def _heads(self) -> Iterator[re.Match[str]]:
        return re.finditer(r"(?m)^## (\S+) \(([^)]*)\)\n", self.changelog.read_text())

    def close_changelog(self, version: Version, date: str) -> None:
        """Turn the unreleased section into that of `version`."""
        head = next(self._heads())
        text = self.changelog.read_text()
        self.changelog.write_text(
            f"{text[: head.start()]}## {version} ({date})\n{text[head.end() :]}"
        )

    def note(self, line: str) -> None:
        """Add a line to the unreleased section; open the next patch version if there is none."""
        version, unreleased, _ = self.newest()
        head = next(self._heads())
        text = self.changelog.read_text()
        if unreleased:
            second = list(self._heads())[1:2]
            end = second[0].start() if second else len(text)
            changed = f"{text[:end].rstrip()}\n- {line}\n\n{text[end:]}".rstrip() + "\n"
        else:
            following = Version.parse(version).next("patch")
            self.set_version(following)
            section = f"## {following} (unreleased)\n\n- {line}\n\n"
            changed = text[: head.start()] + section + text[head.start() :]
        self.changelog.write_text(changed)

    # -------------------------------------------------------------------- its releases

    def tag(self, version: Version) -> str:
        """Return the name of a version's tag."""
        return f"lamina-{self.layer}-v{version}"

    def last_release(self) -> Version | None:
        """Return the highest version that is tagged in HEAD's history; None before the first."""
        names = git(self.root, "tag", "--merged", "HEAD", "--list", f"lamina-{self.layer}-v*")
        found = [re.fullmatch(rf"lamina-{self.layer}-v(\d+\.\d+\.\d+)", n) for n in names.split()]
        return max((Version.parse(match[1]) for match in found if match), default=None)

    def changed_since(self, version: Version) -> list[str]:
        """Return the files that a user gets and that differ from that release."""
        paths = [f"packages/{self.layer}/{name}" for name in ("src", "pyproject.toml")]
        return git(self.root, "diff", "--name-only", self.tag(version), "--", *paths).split()

    def export(self, where: Path, commit: str = "HEAD") -> Package:
        """Write the package as it is at a commit into another directory."""
        command = ["git", "archive", commit, f"packages/{self.layer}"]
        done = subprocess.run(command, cwd=self.root, capture_output=True, check=True)
        where.mkdir(parents=True, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(where, **SAFELY)
        return Package(where, self.layer)


def packages_of(root: Path) -> dict[str, Package]:
    """Return the packages of a tree, lowest first."""
    places = {layer: Package(root, layer) for layer in LAYERS}
    return {layer: package for layer, package in places.items() if package.project.exists()}
