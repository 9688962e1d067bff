"""Every task of this repository. `python3 noxfile.py -s NAME` needs nothing installed.

The first run makes a small environment for nox in `.nox/bootstrap` and restarts under it (so it
works where the system's Python refuses `pip install`, PEP 668). Plain `nox -s NAME` works too.
`python3 noxfile.py -l` lists the sessions; what follows `--` goes to the task itself.

LAMINA_INDEX_URL  package index that torch is taken from (a CPU-only or another CUDA build of it)
LAMINA_PYTHON     an interpreter that has torch: it is used as it is, torch is not installed again
Both are remembered in `.nox/env`; delete that to choose anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
HOUSE = ROOT / ".nox"
ENV = HOUSE / "env"
STAMP = ENV / "lamina.json"  # what the environment is made of
PYTHON = ENV / "bin" / "python"
NOX = "nox>=2025.5.1"  # the first with `requires=` that also waits for parametrised sessions
LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")
PACKAGES = (*(f"packages/{layer}" for layer in LAYERS), "testing")
VERSION = "{}.{}".format(*sys.version_info)
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

# torch is installed without byte code (14 s instead of 56 s); if that is then also forbidden at
# run time, every import of torch compiles it anew (6.4 s instead of 2.6 s).
CHILD_ENV: dict[str, str | None] = {"PYTHONDONTWRITEBYTECODE": None, "PYTHONHOME": None}


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Let one process at a time build `.nox/NAME`; the others wait and then find it made."""
    HOUSE.mkdir(exist_ok=True)
    with open(HOUSE / f"{name}.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is making .nox/{name}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


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
    if Path(sys.prefix).resolve() != HOUSE / "bootstrap":
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


if __name__ == "__main__":
    start()
    sys.exit(0)

import nox  # noqa: E402

nox.needs_version = NOX[3:]
nox.options.sessions = ["lint", "typecheck", "layers", "tests"]

# ------------------------------------------------------------------------ the one environment


def run(session: nox.Session, *command: str | Path, **options: Any) -> object:
    """Run `command`, `python` being the environment's."""
    words = [str(PYTHON) if word == "python" else str(word) for word in command]
    env = {**CHILD_ENV, **options.pop("env", {})}
    return session.run(*words, external=True, env=env, **options)


def pip(session: nox.Session, *words: str | Path) -> None:
    """Install into the shared environment, without byte code; show progress to a person only."""
    quiet = [] if sys.stdout.isatty() else ["-qq"]
    run(session, "python", "-m", "pip", "install", "--no-compile", *quiet, *words)


def digest(*parts: str | Path) -> str:
    """Hash of texts and of the contents of files."""
    texts = [part.read_text() if isinstance(part, Path) else part for part in parts]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def setting(name: str) -> str:
    """Return LAMINA_INDEX_URL or LAMINA_PYTHON; if it is not set, what `.nox/env` was made with."""
    made: dict[str, str] = json.loads(STAMP.read_text()) if STAMP.exists() else {}
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
    if not (2, 11) <= tuple(map(int, found["torch"].split(".")[:2])) < (2, 14):
        sys.exit(f"LAMINA_PYTHON={name} has torch {found['torch']}; Lamina needs >=2.11,<2.14")
    return {**found, "executable": python}


def stage_venv(session: nox.Session) -> None:
    """Make the environment; over a borrowed interpreter, with its packages visible behind ours."""
    if not setting("LAMINA_PYTHON"):
        make_venv(getattr(sys, "_base_executable", sys.executable), ENV)
        return
    make_venv(borrowed()["executable"], ENV)
    # Not --system-site-packages: that would show the packages beneath a venv, not the venv's own.
    lines = [f"import site; site.addsitedir({p!r})" for p in borrowed()["paths"].split(":")]
    (site_packages,) = ENV.glob("lib/python3*/site-packages")
    (site_packages / "zz_borrowed.pth").write_text("\n".join(lines) + "\n")


def stage_torch(session: nox.Session) -> None:
    """Install torch, unless it is borrowed."""
    if setting("LAMINA_PYTHON"):
        return
    index = setting("LAMINA_INDEX_URL")
    gpu = shutil.which("nvidia-smi") or Path("/dev/nvidiactl").exists()
    if sys.platform == "linux" and not gpu and not index:
        session.warn(
            "no NVIDIA GPU here. PyPI's torch for Linux brings gigabytes of CUDA libraries; "
            "LAMINA_INDEX_URL=https://download.pytorch.org/whl/cpu takes a CPU build instead, "
            "LAMINA_PYTHON=/path/to/python a torch that you have"
        )
    source = ["--index-url", index] if index else []
    pip(session, *source, "-r", ROOT / "requirements/torch.txt")


def stage_requirements(session: nox.Session, name: str) -> None:
    """Install a file of requirements, holding torch to the version that is there."""
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    found = run(session, "python", "-c", probe, silent=True, log=False)
    pin = HOUSE / "torch-as-found.txt"
    pin.write_text(f"torch=={str(found).strip()}\n")
    pip(session, "-c", pin, "-r", ROOT / "requirements" / name)


def stage_packages(session: nox.Session) -> None:
    """Install the seven layers and the test bed from the tree, editable."""
    editable = [word for package in PACKAGES for word in ("--editable", ROOT / package)]
    pip(session, "--no-build-isolation", "--no-deps", "--no-index", *editable)


def stages() -> dict[str, tuple[str, Callable[[nox.Session], None]]]:
    """Return what the environment is made of, in order: name -> (key of its sources, how)."""
    lender = borrowed() if setting("LAMINA_PYTHON") else {}
    version = lender.get("python", VERSION)
    files = ROOT / "requirements"
    pyprojects = [ROOT / package / "pyproject.toml" for package in PACKAGES]
    return {
        "venv": (digest("1", str(ROOT), version, json.dumps(lender)), stage_venv),
        "torch": (digest(files / "torch.txt", setting("LAMINA_INDEX_URL")), stage_torch),
        "train": (digest(files / "train.txt"), lambda s: stage_requirements(s, "train.txt")),
        "packages": (digest(*pyprojects), stage_packages),
        "tools": (digest(files / "dev.txt"), lambda s: stage_requirements(s, "dev.txt")),
    }


def bring_up_to_date(session: nox.Session, last: str) -> None:
    """Redo each stage up to `last` whose key has changed; a new interpreter voids all others."""
    with locked("env"):
        made = json.loads(STAMP.read_text()) if STAMP.exists() and PYTHON.exists() else {}
        made |= {name: setting(name) for name in ("LAMINA_PYTHON", "LAMINA_INDEX_URL")}
        for name, (key, build) in stages().items():
            # One that was made by hand has no stamp: complete it rather than throw it away.
            by_hand = name == "venv" and name not in made and (ENV / "bin" / "pip").exists()
            if made.get(name) != key and not by_hand:
                session.log(f"environment: {name}")
                build(session)
                made = {k: v for k, v in made.items() if k.isupper() or name != "venv"}
            if made.get(name) != key:
                made[name] = key
                STAMP.write_text(json.dumps(made, indent=1) + "\n")
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


@functools.cache
def gpus() -> int:
    """Number of GPUs that the environment's torch can use."""
    probe = [str(PYTHON), "-c", "import torch; print(torch.cuda.device_count())"]
    clean = {k: v for k, v in os.environ.items() if k not in CHILD_ENV}
    answer = subprocess.run(probe, capture_output=True, text=True, env=clean)
    return int(answer.stdout.split()[-1]) if answer.returncode == 0 else 0


task = functools.partial(nox.session, venv_backend="none", requires=["env"])


@nox.session(venv_backend="none", requires=["env_train"], default=False)
def train(session: nox.Session) -> None:
    """The main job: train a small GPT on real text on all GPUs, or on 2 CPU ranks."""
    ranks = gpus() or 2
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, CORES // ranks)))
    run(
        session, "python", "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={ranks}", "examples/pretrain/train.py", *session.posargs,
        env={"OMP_NUM_THREADS": threads},
        interrupt_timeout=90,  # Ctrl-C leaves a checkpoint
    )  # fmt: skip


def pytest(session: nox.Session, *words: str | Path, codes: tuple[int, ...] = (0,)) -> None:
    """Run pytest once, in the shared environment."""
    run(session, "python", "-m", "pytest", *words, success_codes=codes)


def workers(dist: str) -> list[str]:
    """Options of pytest-xdist: ranks wait for each other a lot, so two tests fit on two cores."""
    return ["-n", str(min(max(CORES // 2, 2), 8)), "--dist", dist] if CORES >= 2 else []


@task
def tests(session: nox.Session) -> None:
    """The default tests, all layers in one pytest; `-- -k EXPRESSION` and the like pass through."""
    # A module stays on one worker: the run that several tests look at is made once.
    pytest(session, *workers("loadscope"), *session.posargs)


@task(default=False)
def slow(session: nox.Session) -> None:
    """Clean installs, soak and kill tests, network namespaces, real models."""
    pytest(session, "--slow", "-m", "slow", *session.posargs)


CELLS = [
    nox.param(*cell, id="{}-{}-{}".format(*cell))
    for cell in itertools.product(LAYERS, ("gloo", "nccl"), (1, 2, 4, 8))
]


def one_cell(session: nox.Session, layer: str, backend: str, world_size: int) -> None:
    """Multi-device matrix: one layer's tests on one backend and world size."""
    if backend == "nccl" and gpus() < world_size:
        session.skip(f"nccl with {world_size} ranks needs {world_size} GPUs; found {gpus()}")
    if backend == "gloo" and world_size > max(4, CORES):
        session.skip(f"gloo with {world_size} ranks needs {world_size} cores; found {CORES}")
    where = f"packages/{layer}/tests"
    if not (ROOT / where).is_dir():
        session.skip(f"{where} has no tests yet")
    choice = ["--backend", backend, "--world-size", str(world_size)]
    pytest(session, *choice, where, *session.posargs, codes=(0, 5))


def whole_products(session: nox.Session) -> None:
    """Every case of every matrix, not the pairwise cover; resumable; writes docs/matrix.md."""
    pytest(session, "-m", "matrix", *workers("worksteal"), *session.posargs, codes=(0, 5))


def installed_layer(session: nox.Session) -> None:
    """One layer's tests against its built wheel and those beneath, with the tree out of reach."""
    run(session, "python", "tests/clean_install.py", *session.posargs)


matrix = nox.parametrize("layer, backend, world_size", CELLS)(one_cell)
if "--full" in sys.argv or "--installed" in sys.argv:
    matrix = whole_products if "--full" in sys.argv else installed_layer
task(default=False, name="matrix")(matrix)

# ------------------------------------------------------------------------ checks


@task
def lint(session: nox.Session) -> None:
    """Ruff: rules and format. `-- --fix` repairs what can be repaired."""
    run(session, "python", "-m", "ruff", "check", *session.posargs, ".")
    run(session, "python", "-m", "ruff", "format", *([] if session.posargs else ["--check"]), ".")


@task
def typecheck(session: nox.Session) -> None:
    """Mypy, strict, over all packages and the test bed."""
    run(session, "python", "-m", "mypy", *session.posargs)


@task
def layers(session: nox.Session) -> None:
    """What a layer may import and do: import-linter, and a test over the syntax trees."""
    linter = "from importlinter.cli import lint_imports_command as lint; lint()"
    run(session, "python", "-c", linter, "--no-logo")
    pytest(session, "-q", "tests/test_layers.py", *session.posargs)


@task(default=False)
def build(session: nox.Session) -> None:
    """Wheels and source archives of all layers in dist/, checked, and installed one by one."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for layer in LAYERS:
        words = ("build", "--no-isolation", "--outdir", "dist", f"packages/{layer}")
        run(session, "python", "-m", *words, silent=True)
    run(session, "python", "-m", "twine", "check", "--strict", *(ROOT / "dist").iterdir())
    pytest(session, "--slow", "tests/test_installs.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def docs(session: nox.Session) -> None:
    """The pages and the API reference into site/; `-- --serve` shows them as you write."""
    python = ready("docs", "-r", "requirements/docs.txt")
    command = ["serve"] if "--serve" in session.posargs else ["build", "--strict", "-d", "site"]
    run(session, python, "-m", "mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


@task(default=False)
def bench(session: nox.Session) -> None:
    """Measurements beside peers, one after the other; `-- NAME ...` chooses by name."""
    files = sorted((ROOT / "benchmarks").glob("*.py"))
    scripts = [path for path in files if "__main__" in path.read_text()]  # others are imported
    words = session.posargs or [""]
    chosen = [path for path in scripts if any(word in path.stem for word in words)]
    if not chosen:
        session.error(f"{words} matches none of {', '.join(path.stem for path in scripts)}")
    for path in chosen:
        if path.stem in ("gpu_step", "kernels") and not gpus():
            session.warn(f"{path.name} needs a GPU, and there is none: left out")
            continue
        run(session, "python", path.relative_to(ROOT))
