"""Interpreters to try: this system's own, those that are installed, and those that uv brings.

Imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.bootstrap import HOUSE, ready

__all__ = ["interpreters", "of_the_system", "promised", "version_of"]

SYSTEM = Path("/usr/bin/python3")
FIRST, LAST = 11, 14  # minor versions of Python 3 that the packages' classifiers name


def promised() -> list[str]:
    """Return the minor versions that are tried, lowest first."""
    return [f"3.{minor}" for minor in range(FIRST, LAST + 1)]


def version_of(python: Path) -> tuple[int, ...]:
    """Return an interpreter's version, and () for a file that is none."""
    show = "import sys; print(*sys.version_info[:3], sys.version_info[3])"
    try:
        run = subprocess.run([str(python), "-c", show], capture_output=True, text=True, timeout=60)
    except OSError:
        return ()
    words = run.stdout.split()
    return tuple(map(int, words[:3])) if run.returncode == 0 and words[3] == "final" else ()


def of_the_system() -> Path:
    """Return this system's own Python, able to make environments; else the one that runs this.

    Debian has `ensurepip` in a package of its own, which root may install.
    """
    if version_of(SYSTEM) < (3, FIRST):
        return Path(getattr(sys, "_base_executable", sys.executable))
    lacks = subprocess.run([str(SYSTEM), "-c", "import ensurepip"], capture_output=True).returncode
    if lacks and os.getuid() == 0 and shutil.which("apt-get"):
        for words in (["update", "-qq"], ["install", "-y", "-qq", "python3-venv"]):
            subprocess.run(["apt-get", *words], stdin=subprocess.DEVNULL)
    return SYSTEM


def installed() -> Iterator[Path]:
    """Yield interpreters of this machine: of the system, on PATH, of pyenv and of uv."""
    yield SYSTEM
    places = [Path(place) for place in os.environ.get("PATH", "").split(os.pathsep)]
    for version in promised():
        yield from (place / f"python{version}" for place in places if "shims" not in place.parts)
        homes = (Path.home() / ".pyenv/versions", HOUSE / "pythons")
        for home in homes:
            yield from sorted(home.glob(f"*{version}*/bin/python{version}"))


def fetch(version: str) -> str:
    """Have uv, which pip brings, fetch the newest release; return why it could not, or ""."""
    uv = ready("uv", "uv").with_name("uv")
    command = [str(uv), "python", "install", "--no-bin", "--install-dir", str(HOUSE / "pythons")]
    try:
        run = subprocess.run([*command, version], capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return "uv did not end within 300 s"
    causes = [line.strip() for line in run.stderr.splitlines() if "cause" in line.lower()]
    return "" if run.returncode == 0 else f"uv could not fetch it ({'; '.join(causes[-1:])})"


def interpreters(
    asked: Sequence[str], python: Path | None = None
) -> tuple[dict[str, Path], dict[str, str]]:
    """Return version -> interpreter of those asked for, and version -> why it was not reached.

    All, if none is asked for: the system's, and the newest release of each minor version.
    """
    if python is not None:
        return {".".join(map(str, version_of(python))): python}, {}
    why = {version: fetch(version) for version in promised()}
    by_version = {version_of(path): path for path in installed() if path.exists()}
    by_version.pop((), None)
    chosen, missing = {}, {}
    for version in promised():
        minor = tuple(map(int, version.split(".")))
        newest = max((have for have in by_version if have[:2] == minor), default=())
        if newest:
            chosen[newest] = by_version[newest]
        else:
            missing[version] = f"no such Python on this machine, and {why[version]}"
    chosen[version_of(SYSTEM)] = SYSTEM
    names = {".".join(map(str, have)): path for have, path in sorted(chosen.items())}
    wanted = [name for name in names if not asked or name.startswith(tuple(asked))]
    return {name: names[name] for name in wanted}, missing
