"""The tasks that run tests of the tree: the default ones, slow ones, and both on another torch."""

from __future__ import annotations

import nox

from tasks.environment import (
    Environment,
    bring_up_to_date,
    pytest,
    run,
    setting,
    task,
    workers,
)
from tasks.torches import lowest_bounds, supported

SLOWEST = ("--durations=20", "--durations-min=1")
NIGHTLY = "https://download.pytorch.org/whl/nightly/cpu"


@task
def tests(session: nox.Session) -> None:
    """The default tests, all layers in one pytest; `-- -k EXPRESSION` and the like pass through."""
    # A module stays on one worker: the run that several tests look at is made once.
    pytest(session, *workers("loadscope"), *SLOWEST, *session.posargs)


@task(default=False)
def slow(session: nox.Session) -> None:
    """Clean installs, soak and kill tests, network namespaces, real models."""
    pytest(session, "--slow", "-m", "slow", *session.posargs)


@task(default=False)
def order(session: nox.Session) -> None:
    """Records the streams of each scenario, then deletes each wait; `-- --keep` writes a record."""
    run(session, "python", "tests/order_scenarios.py", *session.posargs)


def tests_on(session: nox.Session, where: Environment, words: list[str]) -> None:
    """Run the default tests in an environment with another torch, which is made if need be."""
    bring_up_to_date(session, last="tools", where=where)
    show = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)"
    run(session, "python", "-c", show, where=where)
    pytest(session, *workers("loadscope"), *words, where=where)


@nox.session(venv_backend="none", default=False)
def torch(session: nox.Session) -> None:
    """The default tests on another torch, `-- 2.15 [pytest options]`, in `.nox/torch-2.15`."""
    version, *words = session.posargs or [""]
    if version not in supported():
        session.error(f"-s torch -- {version!r}: name one of {', '.join(supported())}")
    tests_on(session, Environment(f"torch-{version}", torch=(f"torch=={version}.*",)), words)


@nox.session(venv_backend="none", default=False)
def nightly(session: nox.Session) -> None:
    """The default tests on PyTorch's coming version; they may fail, and then say so loudly."""
    source = ("--pre", "--upgrade", "torch", "--index-url", setting("LAMINA_INDEX_URL") or NIGHTLY)
    tests_on(session, Environment("torch-nightly", torch=source), session.posargs)


@nox.session(venv_backend="none", default=False)
def lowest(session: nox.Session) -> None:
    """The default tests on the lowest version of everything that the packages say they take."""
    where = Environment(
        "torch-lowest", torch=(f"torch=={supported()[0]}.*",), bounds=lowest_bounds()
    )
    tests_on(session, where, session.posargs)
