"""The task `fuzz`."""

from __future__ import annotations

import nox

from tasks.environment import run, task


@task(default=False)
def fuzz(session: nox.Session) -> None:
    """Random programs against one process: `-- --cases N --seed S`, `-- --case S:INDEX`."""
    run(session, "python", "tests/fuzz/run.py", *session.posargs)
