"""The tasks that run tests of the tree: the default ones, slow ones, and both on another torch."""

from __future__ import annotations

import nox

from tasks.cores import workers
from tasks.environment import Environment, bring_up_to_date, pytest, run, setting, task
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
def architectures(session: nox.Session) -> None:
    """The main job's architectures, tiny, over eight layouts: four ranks over gloo, fake ones."""
    chosen = ["--slow", "-k", "(trains and ranks4) or planned_over"]
    place = "examples/tests/test_architectures.py"
    pytest(session, *workers("load"), *SLOWEST, place, *chosen, *session.posargs)


@task(default=False)
def order(session: nox.Session) -> None:
    """Records the streams of each scenario, then deletes each wait; `-- --keep` writes a record."""
    run(session, "python", "tests/order_scenarios.py", *session.posargs)


SHOW = "import sys, torch; print('Python', sys.version.split()[0], 'torch', torch.__version__)\n"
# pip takes a release from elsewhere, such as its own configuration, if the index has no nightly.
ONLY_COMING = """
import re
if not re.match(r"[0-9.]+(dev|a|rc)", torch.__version__):
    sys.exit(f"torch {torch.__version__} is a release, and no coming version: {sys.argv[1]} has "
             "none or is out of reach. Delete .nox/torch-nightly, and set LAMINA_INDEX_URL to an "
             "index of nightly builds")
"""


def tests_on(session: nox.Session, where: Environment, words: list[str], *check: str) -> None:
    """Run the default tests in an environment with another torch, which is made if need be."""
    bring_up_to_date(session, last="tools", where=where)
    run(session, "python", "-c", *(check or (SHOW,)), where=where)
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
    index = setting("LAMINA_INDEX_URL") or NIGHTLY
    where = Environment(
        "torch-nightly", torch=("--pre", "--upgrade", "torch", "--index-url", index)
    )
    tests_on(session, where, session.posargs, SHOW + ONLY_COMING, index)


@nox.session(venv_backend="none", default=False)
def lowest(session: nox.Session) -> None:
    """The default tests on the lowest version of everything that the packages say they take."""
    where = Environment(
        "torch-lowest", torch=(f"torch=={supported()[0]}.*",), bounds=lowest_bounds()
    )
    tests_on(session, where, session.posargs)
