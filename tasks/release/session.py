"""The tasks around releases: `release`, `versions`, `compat`, `budgets`."""

from __future__ import annotations

from pathlib import Path

import nox

from tasks.bootstrap import ROOT, ready
from tasks.environment import run, task
from tasks.release.check import check
from tasks.release.packages import packages_of


def griffe() -> Path:
    """Return a Python that has griffe: it reads sources, so it needs neither torch nor Lamina."""
    return ready("api", "-r", "requirements/api.txt")


@task(default=False)
def release(session: nox.Session) -> None:
    """Release a layer: `-- fsdp minor`; version, ranges, changelog, archives, tests, tag."""
    words = (*session.posargs, "--griffe", griffe())
    run(session, "python", "-m", "tasks.release.make", "release", *words)


@task(default=False)
def archives(session: nox.Session) -> None:
    """The archives of a tag, or of a layer as it stands, in dist/: built twice, compared, tried."""
    run(session, "python", "-m", "tasks.release.make", "archives", *session.posargs)


@nox.session(venv_backend="none", default=False)
def versions(session: nox.Session) -> None:
    """What kind of version each layer's changes need since its last tag; fails on disagreement."""
    python = griffe()
    chosen = session.posargs or list(packages_of(ROOT))
    failed = []
    for layer in chosen:
        verdict = check(packages_of(ROOT)[layer], python)
        print(verdict.table_row(), flush=True)
        for line in (*verdict.breaking, *verdict.added):
            print(f"    {line}")
        failed += [f"{layer}: {complaint}" for complaint in verdict.complaints]
    if failed:
        session.error("\n".join(failed))


@task(default=False)
def compat(session: nox.Session) -> None:
    """Each new layer over the last released ones beneath, and released ones above over it."""
    run(session, "python", "-m", "tasks.release.neighbours", *session.posargs)


@task(default=False)
def budgets(session: nox.Session) -> None:
    """What importing and installing each layer costs, against its budget; `-- --keep` records."""
    run(session, "python", "-m", "tasks.release.budgets", *session.posargs)
