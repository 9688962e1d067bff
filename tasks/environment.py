"""The environments in `.nox/` that tasks run in, and the means to run things in them.

`.nox/env` is the one that all tasks share. `.nox/torch-NAME` is the same with another torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nox

from tasks.bootstrap import (
    HOUSE,
    LAYERS,
    ROOT,
    VERSION,
    in_one_line,
    locked,
    make_venv,
    write_lent,
    write_torchrun,
)
from tasks.torches import in_range, range_of_tree

PACKAGES = (*(f"packages/{layer}" for layer in LAYERS), "testing")

# torch is installed without byte code (14 s instead of 56 s); if that is then also forbidden at
# run time, every import of torch compiles it anew (6.4 s instead of 2.6 s).
CHILD_ENV: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONHOME": None}
# What training imports of torch. A NumPy that pip is just writing could be half there.
IMPORT_TORCH = """
import sys
sys.modules["numpy"] = None
import torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp, torch.distributed.run
import torch.distributed.tensor
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in `.nox/`: its name, and what pip is told besides the packages.

    Args:
        name: directory in `.nox/`.
        torch: words for pip that install torch; without any, `requirements/torch.txt` or, if
            LAMINA_PYTHON is set, the torch of that interpreter.
        bounds: constraints on all other installs, one a line.
    """

    name: str = "env"
    torch: tuple[str, ...] = ()
    bounds: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """Return the environment's directory."""
        return HOUSE / self.name

    @property
    def python(self) -> Path:
        """Return the environment's interpreter."""
        return self.place / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Return the file that says what the environment was made of."""
        return self.place / "lamina.json"

    def made(self) -> dict[str, str]:
        """Return the keys of the stages that are done."""
        if not (self.stamp.exists() and self.python.exists()):
            return {}
        keys: dict[str, str] = json.loads(self.stamp.read_text())
        return keys


SHARED = Environment()


def run(
    session: nox.Session, *command: str | Path, where: Environment = SHARED, **options: Any
) -> object:
    """Run `command`, `python` being the environment's."""
    words = [str(where.python) if word == "python" else str(word) for word in command]
    env = {**CHILD_ENV, **options.pop("env", {})}
    return session.run(*words, external=True, env=env, **options)


def pip(session: nox.Session, where: Environment, *words: str | Path) -> None:
    """Install into an environment, without byte code; a person sees pip's newest line."""
    command = ["python", "-m", "pip", "install", "--no-compile"]
    if sys.stdout.isatty():
        with in_one_line() as shown:
            run(session, *command, *words, where=where, stdout=shown, stderr=sys.stderr)
    else:
        run(session, *command, "-qq", *words, where=where)


# ------------------------------------------------------------------------ how one is made


def digest(*parts: str | Path) -> str:
    """Hash of texts and of the contents of files."""
    texts = [part.read_text() if isinstance(part, Path) else part for part in parts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def setting(name: str) -> str:
    """Return LAMINA_INDEX_URL or LAMINA_PYTHON; if it is not set, what `.nox/env` was made with."""
    made: dict[str, str] = json.loads(SHARED.stamp.read_text()) if SHARED.stamp.exists() else {}
    return os.environ.get(name, made.get(name, ""))


@functools.cache
def borrowed() -> dict[str, str]:
    """What LAMINA_PYTHON's interpreter has: its version, torch's, and where its packages are."""
    probe = (
        "import importlib.metadata as m, json, site, sys, sysconfig\n"
        "user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []\n"
        "paths = dict.fromkeys([sysconfig.get_path('purelib'), *site.getsitepackages(), *user])\n"
        "have = dict(python=sys.version, torch=m.version('torch'), paths=':'.join(paths))\n"
        "print(json.dumps(have))"
    )
    name = setting("LAMINA_PYTHON")
    python = shutil.which(name)
    if python is None:
        sys.exit(f"LAMINA_PYTHON={name} is no executable; give the path of a Python that has torch")
    answer = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    if answer.returncode:
        sys.exit(f"LAMINA_PYTHON={name} has no torch to borrow:\n{answer.stderr.strip()}")
    found: dict[str, str] = json.loads(answer.stdout.splitlines()[-1])
    if not in_range(found["torch"]):
        sys.exit(f"LAMINA_PYTHON={name} has torch {found['torch']}; Lamina needs {range_of_tree()}")
    return {**found, "executable": python}


def lends(where: Environment) -> dict[str, str]:
    """Return what the environment borrows: nothing, if it has a torch of its own."""
    return {} if where.torch or not setting("LAMINA_PYTHON") else borrowed()


def stage_venv(session: nox.Session, where: Environment) -> None:
    """Make the environment; over a borrowed interpreter, with its packages visible behind ours."""
    lender = lends(where)
    if not lender:
        make_venv(getattr(sys, "_base_executable", sys.executable), where.place)
        return
    make_venv(lender["executable"], where.place)
    (site_packages,) = where.place.glob("lib/python3*/site-packages")
    write_lent(site_packages, lender["paths"].split(":"))
    write_torchrun(where.python)


def stage_torch(session: nox.Session, where: Environment) -> None:
    """Install torch, unless it is borrowed."""
    if lends(where):
        return
    index = setting("LAMINA_INDEX_URL")
    gpu = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if sys.platform == "linux" and not gpu and not index:
        session.warn(
            "no NVIDIA GPU here. PyPI's torch for Linux brings gigabytes of CUDA libraries; "
            "LAMINA_INDEX_URL=https://download.pytorch.org/whl/cpu takes a CPU build instead, "
            "LAMINA_PYTHON=/path/to/python a torch that you have"
        )
    source = ["--index-url", index] if index and "--index-url" not in where.torch else []
    pip(session, where, *source, *(where.torch or ("-r", ROOT / "requirements/torch.txt")))


@contextlib.contextmanager
def compiling_torch(where: Environment) -> Iterator[None]:
    """Another core writes torch's byte code while pip works; or else each first rank would."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    env = {k: v for k, v in os.environ.items() if k not in CHILD_ENV}
    with subprocess.Popen([where.python, "-c", IMPORT_TORCH], env=env, **quiet):
        yield


def stage_requirements(session: nox.Session, where: Environment, name: str) -> None:
    """Install a file of requirements, holding torch to the version that is there."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    found = str(run(session, "python", "-c", probe, where=where, silent=True, log=False)).strip()
    bounds = [f"torch=={found}", *where.bounds]
    # Each torch goes with one Triton, which CPU builds do not ask for: up to 2.13 with 3.7.
    if tuple(map(int, found.split(".")[:2])) < (2, 14):
        bounds.append("triton<3.8")
    pin = HOUSE / f"{where.name}-constraints.txt"
    pin.write_text("\n".join(bounds) + "\n")
    with compiling_torch(where):
        pip(session, where, "-c", pin, "-r", ROOT / "requirements" / name)


def stage_packages(session: nox.Session, where: Environment) -> None:
    """Install the seven layers and the test bed from the tree, editable."""
    editable = [word for package in PACKAGES for word in ("--editable", ROOT / package)]
    pip(session, where, "--no-build-isolation", "--no-deps", "--no-index", *editable)


Stage = Callable[[nox.Session, Environment], None]


def stages(where: Environment) -> dict[str, tuple[str, Stage]]:
    """Return what an environment is made of, in order: name -> (key of its sources, how)."""
    lender = lends(where)
    version = lender.get("python", VERSION)
    files = ROOT / "requirements"
    torch = (digest(*where.torch),) if where.torch else ()
    pyprojects = [ROOT / package / "pyproject.toml" for package in PACKAGES]
    train, tools = (
        functools.partial(stage_requirements, name=name) for name in ("train.txt", "dev.txt")
    )
    return {
        "venv": (digest("2", str(ROOT), version, json.dumps(lender)), stage_venv),
        "torch": (digest(files / "torch.txt", setting("LAMINA_INDEX_URL"), *torch), stage_torch),
        "train": (digest(files / "train.txt", *where.bounds), train),
        "packages": (digest(*pyprojects), stage_packages),
        "tools": (digest(files / "dev.txt", *where.bounds), tools),
    }


def bring_up_to_date(session: nox.Session, last: str, where: Environment = SHARED) -> None:
    """Redo each stage up to `last` whose key has changed; a new interpreter voids all others."""
    with locked(where.name):
        made = where.made()
        made |= {name: setting(name) for name in ("LAMINA_PYTHON", "LAMINA_INDEX_URL")}
        for name, (key, build) in stages(where).items():
            # One that was made by hand has no stamp: complete it rather than throw it away.
            by_hand = name == "venv" and name not in made and (where.place / "bin/pip").exists()
            if made.get(name) != key and not by_hand:
                session.log(f"environment {where.name}: {name}")
                build(session, where)
                made = {k: v for k, v in made.items() if k.isupper() or name != "venv"}
            if made.get(name) != key:
                made[name] = key
                where.stamp.write_text(json.dumps(made, indent=1) + "\n")
            if name == last:
                break


@nox.session(venv_backend="none", default=False)
def env(session: nox.Session) -> None:
    """Make .nox/env (torch, tools, all packages editable), or find it up to date in a second."""
    bring_up_to_date(session, last="tools")


@nox.session(venv_backend="none", default=False)
def env_train(session: nox.Session) -> None:
    """Make the part of .nox/env that training needs."""
    bring_up_to_date(session, last="packages")


task = functools.partial(nox.session, venv_backend="none", requires=["env"])

# ------------------------------------------------------------------------ what tasks do in one


@functools.cache
def gpus(where: Environment = SHARED) -> int:
    """Number of GPUs that the environment's torch can use."""
    if not Path("/dev/nvidiactl").exists():  # no driver: torch, which takes seconds, need not look
        return 0
    probe = [str(where.python), "-c", "import torch; print(torch.cuda.device_count())"]
    clean = {k: v for k, v in os.environ.items() if k not in CHILD_ENV}
    answer = subprocess.run(probe, capture_output=True, text=True, env=clean)
    return int(answer.stdout.split()[-1]) if answer.returncode == 0 else 0


def pytest(session: nox.Session, *words: str | Path, **options: Any) -> None:
    """Run pytest once, in the shared environment or in `where`."""
    run(session, "python", "-m", "pytest", *words, **options)
