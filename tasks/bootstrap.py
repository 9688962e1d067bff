"""What runs before nox is there: the standard library alone, and the Python at hand.

`start` makes a small environment for nox in `.nox/bootstrap` and restarts under it, so that a
system whose Python refuses `pip install` (PEP 668) needs nothing installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Thread
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / ".nox"
NOX = "nox>=2025.5.1"  # the first with `requires=` that also waits for parametrised sessions
LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")  # lowest first
# Faces of a layer beside `lamina.LAYER` and `lamina.LAYER.engine`.
SUB_FACES = {
    "fsdp": ("check",),
    "models": ("attention", "moe", "mamba", "vision", "parallel_types", "plan"),
}
VERSION = "{}.{}".format(*sys.version_info)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time build `.nox/NAME`; the others wait and then find it made."""
    try:
        HOUSE.mkdir(exist_ok=True)
        lock = open(HOUSE / f"{name}.lock", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        sys.exit(
            f"{HOUSE} cannot be written ({error.strerror}), and every task, -l too, keeps its\n"
            "environment there. Clone the repository into a directory of yours, or point .nox\n"
            "to one by a link."
        )
    with lock as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is making .nox/{name}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def in_one_line() -> Iterator[IO[str]]:
    """A file for a command's output, of which a terminal shows the newest line alone."""
    reading, writing = os.pipe()
    width = shutil.get_terminal_size().columns - 1

    def show() -> None:
        with open(reading, errors="replace") as lines:
            for line in lines:
                print(f"\r\x1b[K{line.strip()[:width]}", end="", flush=True)

    thread = Thread(target=show)
    thread.start()
    try:
        with open(writing, "w") as file:
            yield file
    finally:
        thread.join()
        print("\r\x1b[K", end="", flush=True)


def make_venv(python: str, where: Path) -> None:
    """Make a virtual environment with pip, also where the system ships Python in pieces."""
    shutil.rmtree(where, ignore_errors=True)
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if subprocess.run([python, "-c", "import venv, ensurepip"], **quiet).returncode == 0:
        subprocess.run([python, "-m", "venv", str(where)], check=True)
        return
    # Debian and Ubuntu split ensurepip off. A pip that is already there can fill a bare venv.
    bare = [python, "-m", "venv", "--without-pip", str(where)]
    fill = [python, "-m", "pip", "--python", str(where / "bin" / "python"), "install", "-q", "pip"]
    if all(subprocess.run(command, **quiet).returncode == 0 for command in (bare, fill)):
        return
    shutil.rmtree(where, ignore_errors=True)
    sys.exit(
        f"{python} cannot make a virtual environment: it has no `ensurepip` and no usable pip.\n"
        "Install it (Debian, Ubuntu: apt install python3-venv), or start this file with another\n"
        "interpreter: /path/to/python3 noxfile.py ..."
    )


def write_torchrun(python: Path) -> None:
    """Write `torchrun` beside an environment's interpreter, as pip does where it installs torch."""
    launcher = python.with_name("torchrun")
    # A shell starts it: a path to Python may be too long, or have a space, for a line after `#!`.
    launcher.write_text(f'#!/bin/sh\nexec "{python}" -m torch.distributed.run "$@"\n')
    launcher.chmod(0o755)


LENT = """
import site
import sys
from importlib.machinery import PathFinder

own = set(sys.path)
for place in {places!r}:
    site.addsitedir(place)
lent = set(sys.path) - own


class OwnLamina:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "lamina":
            return None
        spec = PathFinder.find_spec(name, [path for path in sys.path if path not in lent])
        if spec is not None:  # of a list, or it would look again when `sys.path` changes
            spec.submodule_search_locations = list(spec.submodule_search_locations)
        return spec


if lent:  # site may come here twice
    sys.meta_path.insert(0, OwnLamina)
"""


def write_lent(site_packages: Path, places: Iterable[str]) -> None:
    """Show an environment the packages of another one behind its own, but not its Lamina.

    `lamina` is a namespace of all directories on the path: a module that is missing in this tree
    would come from the other one.
    """
    # Not --system-site-packages: that would show the packages beneath a venv, not the venv's own.
    # Text and no module: an environment that lends may borrow as well, in the same way.
    program = LENT.format(places=list(places))
    (site_packages / "zz_borrowed.pth").write_text(f"import sys; exec({program!r}, {{}})\n")


def ready(name: str, *install: str) -> Path:
    """Return the Python of `.nox/NAME`, a small environment with what pip is told to install."""
    where = HOUSE / name
    files = [Path(word).read_text() for word in install if Path(word).is_file()]
    wanted = "\n".join([VERSION, str(ROOT), *install, *files])
    with locked(name):
        stamp = where / "made-for"
        if not stamp.exists() or stamp.read_text() != wanted:
            print(f"making .nox/{name} (a few seconds)", flush=True)
            make_venv(getattr(sys, "_base_executable", sys.executable), where)
            pip = [str(where / "bin" / "python"), "-m", "pip", "install", "-qq", *install]
            if code := subprocess.run(pip).returncode:
                sys.exit(f"pip could not install {' '.join(install)} (exit code {code})")
            stamp.write_text(wanted)
    return where / "bin" / "python"


def start() -> None:
    """Restart under an environment that has nox, then run nox on this file."""
    os.chdir(ROOT)
    if sys.argv[1:2] == ["-s"] and sys.argv[2:3] in (["gpu"], ["validate"]):
        # They need no nox: a machine that was lent for minutes may have no network to fetch it.
        from tasks.hardware.command import main as command

        words = sys.argv[3:]
        sys.exit(command(sys.argv[2], words[1:] if words[:1] == ["--"] else words))
    if Path(sys.prefix).resolve() != (HOUSE / "bootstrap").resolve():  # `.nox` may be a link
        python = str(ready("bootstrap", NOX))
        os.execv(python, [python, str(ROOT / "noxfile.py"), *sys.argv[1:]])
    from nox.__main__ import main

    closing = HOUSE / f"closing-line.{os.getpid()}"
    os.environ["LAMINA_CLOSING_LINE"] = str(closing)  # pytest's last line will be there
    try:
        main()
    finally:
        if closing.exists():
            print(closing.read_text(), end="", flush=True)
            closing.unlink()
