"""Makes a release of one layer: version, ranges above, changelog, archives, their test, the tag.

Everything happens in a clone. The tree gets the commit and the tag only when all of it has gone
well, so a release that fails leaves nothing behind.

`python -m tasks.release.make release LAYER KIND --griffe PYTHON [--dry-run]`, in `.nox/env`;
`... archives TAG` gives a release's archives once more, for whoever publishes them.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tasks.bootstrap import LAYERS, ROOT
from tasks.clean_install import closure, gather, unpack
from tasks.release.archives import build, build_reproducibly, date_of
from tasks.release.check import Verdict, check
from tasks.release.packages import Kind, Package, Version, git, packages_of
from tasks.snippets import Job, run, snippets

Check = Callable[[Package], Verdict]
Smoke = Callable[[Package, list[Path]], str]


class ReleaseError(Exception):
    """The release cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Release:
    """A release that was made: its tag, its archives, and the commit as a patch."""

    tag: str
    archives: list[Path]
    patch: str


def target(package: Package, kind: Kind) -> Version:
    """Return the version to release.

    It follows the last release. The first release has the version that pyproject.toml says.
    """
    last = package.last_release()
    return last.next(kind) if last else package.version


def edit(root: Path, layer: str, version: Version, date: str) -> list[str]:
    """Write version, changelog and the ranges of the layers above; return whose ranges moved."""
    packages = packages_of(root)
    package = packages[layer]
    head, unreleased, lines = package.newest()
    if not unreleased or not lines:
        raise ReleaseError(
            f"{package.changelog.relative_to(root)} begins with {head}, "
            f"{'with no line' if unreleased else 'which is released'}: say there, in a version "
            "marked (unreleased), what changed"
        )
    package.set_version(version)
    package.close_changelog(version, date)
    moved = []
    for other in packages.values():
        if other.set_range(layer, version):
            other.note(f"Needs lamina-{layer} {version.range}.")
            moved.append(other.layer)
    return moved


def release(
    root: Path,
    layer: str,
    kind: Kind,
    *,
    check: Check,
    smoke: Smoke,
    date: str,
    out: Path,
    dry_run: bool = False,
) -> Release:
    """Release a layer from a tree without uncommitted changes.

    Args:
        root: the tree.
        layer: the layer.
        kind: what kind of version follows the last release.
        check: says what kind its changes need.
        smoke: tries the wheel that the source archive gives; returns what went wrong, or "".
        date: of the release, YYYY-MM-DD.
        out: where the archives go.
        dry_run: do all of it, but leave the tree, its tags and `out` alone.

    Raises:
        ReleaseError: what the changes need, or a test of the archives, speaks against it.
    """
    if changes := git(root, "status", "--porcelain"):
        raise ReleaseError(f"commit or stash first; a release is made of a commit:\n{changes}")
    with tempfile.TemporaryDirectory(prefix="lamina-release-") as name:
        place = Path(name)
        git(root, "clone", "-q", "--shared", str(root), str(place / "tree"))
        package = Package(place / "tree", layer)
        version = target(package, kind)
        moved = edit(package.root, layer, version, date)
        git(package.root, "add", "-A")
        words = f"\n\nRanges moved in: {', '.join(moved)}." if moved else ""
        commit(package.root, f"{layer}: {version}{words}")
        refuse_if_too_small(check(package), version)
        archives = build_reproducibly(package, place / "build")
        if complaint := smoke(package, archives):
            raise ReleaseError(f"the archives of {layer} {version} do not work:\n{complaint}")
        notes = "\n".join(package.newest()[2])
        tag = package.tag(version)
        git(package.root, *author(), "tag", "-a", tag, "-m", f"lamina-{layer} {version}\n\n{notes}")
        patch = git(package.root, "show", "--stat", "--patch", "HEAD")
        if dry_run:
            return Release(tag, [], patch)
        git(root, "fetch", "-q", str(package.root), "HEAD")
        git(root, "merge", "-q", "--ff-only", "FETCH_HEAD")
        git(root, "fetch", "-q", str(package.root), "tag", tag)
        out.mkdir(parents=True, exist_ok=True)
        kept = [Path(shutil.copy(archive, out)) for archive in archives]
        return Release(tag, kept, patch)


def author() -> list[str]:
    """Return git's words for an author, where none is configured (a machine of CI)."""
    known = subprocess.run(["git", "config", "user.email"], capture_output=True).returncode == 0
    return [] if known else ["-c", "user.name=Lamina", "-c", "user.email=release@lamina"]


def commit(root: Path, message: str) -> None:
    """Commit what is staged, without hooks: they belong to the tree that people work in."""
    git(root, *author(), "commit", "-q", "--no-verify", "-m", message)


def refuse_if_too_small(verdict: Verdict, version: Version) -> None:
    """Raise ReleaseError unless the version is high enough for what the layer's changes need.

    The verdict is of the commit that is to be tagged: its version is the one to be released, and
    its changelog has no unreleased section any more. So only these two questions remain open.
    """
    if verdict.released is None:
        return
    if verdict.needs is None:
        raise ReleaseError(f"{verdict.layer} has not changed since {verdict.released}")
    lowest = verdict.released.next(verdict.needs)
    if version < lowest:
        why = "\n".join(verdict.breaking or verdict.added)
        raise ReleaseError(f"{verdict.layer} needs {lowest}, a {verdict.needs} version:\n{why}")


def smoke_of_sdist(package: Package, archives: list[Path]) -> str:
    """Run the layer's README over its wheel, which the source archive gives too."""
    with tempfile.TemporaryDirectory(prefix="lamina-sdist-") as name:
        place = Path(name)
        (wheel,) = (path for path in archives if path.suffix == ".whl")
        beneath = [packages_of(package.root)[layer] for layer in package.requires()]
        wheels = [wheel]
        for other in beneath:
            wheels += build(other.place, place / other.layer, date_of(other), "wheel")
        paths = (unpack(wheels, place / "site"),)
        base = gather(closure("torch", "numpy").values(), place / "torch")
        job = Job(tuple(snippets(package.place / "README.md")), paths)
        twine = [sys.executable, "-m", "twine", "check", "--strict", *map(str, archives)]
        told = subprocess.run(twine, capture_output=True, text=True)
        return told.stdout if told.returncode else run([job], base)[0]


def archives_of(root: Path, name: str, out: Path) -> list[Path]:
    """Build and try the archives of a tag, or of a layer as HEAD has it; put them into `out`."""
    layer = name if name in LAYERS else name.removeprefix("lamina-").partition("-v")[0]
    commit = "HEAD" if name in LAYERS else f"refs/tags/{name}"
    if layer not in LAYERS:
        raise ReleaseError(f"{name!r} is no layer and no tag such as lamina-fsdp-v0.2.0")
    with tempfile.TemporaryDirectory(prefix="lamina-archives-") as place:
        tree = Path(place) / "tree"
        git(root, "clone", "-q", "--shared", str(root), str(tree))
        git(tree, "checkout", "-q", git(root, "rev-parse", f"{commit}^{{commit}}"))
        package = Package(tree, layer)
        if commit != "HEAD" and package.tag(package.version) != name:
            raise ReleaseError(f"{name} is a tag of version {package.version}")
        made = build_reproducibly(package, Path(place) / "build")
        if complaint := smoke_of_sdist(package, made):
            raise ReleaseError(f"the archives of {name} do not work:\n{complaint}")
        out.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.copy(archive, out)) for archive in made]


def main(words: Sequence[str]) -> int:
    """Release, or build the archives of a release; say what to do next."""
    parser = argparse.ArgumentParser("noxfile.py -s")
    forms = parser.add_subparsers(dest="form", required=True)
    making = forms.add_parser("release")
    making.add_argument("layer", choices=LAYERS)
    making.add_argument("kind", choices=get_args(Kind))
    making.add_argument("--griffe", type=Path, required=True, help=argparse.SUPPRESS)
    making.add_argument("--dry-run", action="store_true", help="leave the tree as it is")
    forms.add_parser("archives").add_argument("name", metavar="TAG or LAYER")
    options = parser.parse_args(words)
    try:
        if options.form == "archives":
            tell(archives_of(ROOT, options.name, ROOT / "dist"))
            return 0
        made = release(
            ROOT,
            options.layer,
            options.kind,
            check=lambda package: check(package, options.griffe),
            smoke=smoke_of_sdist,
            date=time.strftime("%Y-%m-%d"),
            out=ROOT / "dist",
            dry_run=options.dry_run,
        )
    except (ReleaseError, RuntimeError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(made.patch)
    tell(made.archives)
    if options.dry_run:
        print("nothing was changed: --dry-run")
    else:
        print(f"next: git push --follow-tags, which publishes {made.tag}")
    return 0


def tell(archives: Sequence[Path]) -> None:
    """Say where the archives are."""
    for path in archives:
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
