"""The everyday tasks beside tests: the main job, checks, wheels, pages, measurements."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path

import nox
from nox.command import CommandFailed

from tasks.book import write_decisions
from tasks.bootstrap import LAYERS, ROOT, ready
from tasks.cores import CORES
from tasks.environment import gpus, pytest, run, task


@nox.session(venv_backend="none", requires=["env_train"], default=False)
def train(session: nox.Session) -> None:
    """The main job: train a small GPT on real text on all GPUs, or on 2 CPU ranks."""
    job, words = "examples/pretrain/train.py", session.posargs
    if "--dry-run" in words:
        run(session, "python", job, *words)
        return
    asked = words[words.index("--ranks") + 1 :] if "--ranks" in words else []
    ranks = int(asked[0]) if asked and asked[0].isdigit() else 0
    ranks = ranks or gpus() or 2
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, CORES // ranks)))
    session.log(f"starting {ranks} rank{'s'[: ranks > 1]}: the first lines take some seconds")
    last = Path(session.create_tmp()) / "last-line"
    last.unlink(missing_ok=True)
    try:
        run(
            session, "python", "tasks/torchrun.py", last, "--standalone",
            "--local-addr=127.0.0.1",  # the machine's own name may have no address
            f"--nproc-per-node={ranks}", job, *words,
            env={"OMP_NUM_THREADS": threads},
            interrupt_timeout=90,  # Ctrl-C leaves a checkpoint
        )  # fmt: skip
    except CommandFailed:
        if not last.exists():
            raise
        again = shlex.join(["python3", "noxfile.py", "-s", "train", "--", *words])
        session.error(f"{last.read_text()}; to go on from the newest checkpoint: {again}")


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
    """What a layer may import and do, and the plan of the house: over the syntax trees."""
    linter = "from importlinter.cli import lint_imports_command as lint; lint()"
    run(session, "python", "-c", linter, "--no-logo")
    pytest(session, "-q", "tests/test_layers.py", "tests/test_house.py", *session.posargs)


@nox.session(venv_backend="none", default=False)
def lines(session: nox.Session) -> None:
    """Lines of code per layer, comments per 100 of them, and classes that are too large."""
    session.run("python3", "-m", "tasks.lines", *session.posargs, external=True)


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
    write_decisions()
    command = ["serve"] if "--serve" in session.posargs else ["build", "--strict", "-d", "site"]
    run(session, python, "-m", "mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})
    if "--serve" not in session.posargs:
        session.log("open site/index.html: it and its search need no server")


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
