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

SYSTEM = Path("/usr/bin/python3")
FIRST, LAST = 11, 14  # minor versions of Python 3: those that torch has


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


def interpreters(asked: Sequence[str]) -> tuple[list[Path], dict[str, str]]:
    """Return the interpreters asked for, and version -> why it was not reached.

    All, if none is asked for: the system's, and the newest release of each minor version. They are
    in the order of their versions.
    """
    why = {minor: fetch(minor) for minor in promised() if any_of(minor, asked)}
    have = {version_of(path): path for path in installed() if path.exists()}
    have[version_of(SYSTEM)] = SYSTEM  # by its own name
    names = {".".join(map(str, version)): version for version in sorted(have) if version}
    chosen, missing = {version_of(SYSTEM)}, {}
    for minor, reason in why.items():
        if inside := [version for name, version in names.items() if any_of(name, [minor])]:
            chosen.add(inside[-1])
        else:
            missing[minor] = f"this machine has none, and {reason}"
    kept = [version for name, version in names.items() if version in chosen and any_of(name, asked)]
    return [have[version] for version in kept], missing


def any_of(version: str, asked: Sequence[str]) -> bool:
    """Whether 3.11.2 is in what was asked for: nothing, 3.11.2 or 3.11; and the other way round."""
    pairs = [(version.split("."), each.split(".")) for each in asked]
    return not asked or any(all(map(str.__eq__, one, other)) for one, other in pairs)
