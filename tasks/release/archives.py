"""Source archives and wheels: made so that the same commit gives the same bytes, and tried."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

from tasks.release.packages import SAFELY, Package, git


def build(place: Path, out: Path, date: int, *kinds: str) -> list[Path]:
    """Build a package's archives with this Python's hatchling; return them.

    Args:
        place: the package's directory.
        out: where the archives go.
        date: what archives give as the time of their files, in seconds since 1970.
        kinds: "sdist", "wheel"; neither means both.
    """
    words = [word for kind in kinds or ("sdist", "wheel") for word in ("-t", kind)]
    command = [sys.executable, "-m", "hatchling", "build", *words, "-d", str(out)]
    done = subprocess.run(
        command,
        cwd=place,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(date)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{place} does not build:\n{done.stdout}{done.stderr}")
    return sorted(out.iterdir())


def digests(paths: list[Path]) -> dict[str, str]:
    """Return file name -> hash of what it holds."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def date_of(package: Package, commit: str = "HEAD") -> int:
    """Return the time of a commit."""
    return int(git(package.root, "log", "-1", "--format=%ct", commit))


def wheel_of_sdist(sdist: Path, where: Path, date: int) -> Path:
    """Build the wheel from a source archive, with nothing of the tree at hand."""
    with tarfile.open(sdist) as archive:
        archive.extractall(where / "source", **SAFELY)
    (place,) = (where / "source").iterdir()
    (wheel,) = build(place, where / "wheel", date, "wheel")
    return wheel


def build_reproducibly(package: Package, where: Path, commit: str = "HEAD") -> list[Path]:
    """Build a commit's archives twice, in different places and at different times of their files.

    Raises RuntimeError if the bytes differ, or if the source archive gives another wheel.
    """
    date, made = date_of(package, commit), []
    for number, mask in enumerate((0o022, 0o077)):
        before = os.umask(mask)
        try:
            place = package.export(where / f"tree{number}", commit).place
            for path in place.rglob("*"):
                os.utime(path, (number + 1, number + 1))
            made.append(build(place, where / f"archives{number}", date))
        finally:
            os.umask(before)
    first, second = (digests(paths) for paths in made)
    if first != second:
        different = [name for name in first if first[name] != second.get(name)]
        raise RuntimeError(f"two builds of {package.layer} at {commit} differ: {different}")
    (sdist,) = (path for path in made[0] if path.name.endswith(".tar.gz"))
    wheel = wheel_of_sdist(sdist, where / "again", date)
    if digests([wheel])[wheel.name] != first.get(wheel.name):
        raise RuntimeError(f"the source archive of {package.layer} gives another wheel: {wheel}")
    return made[0]
