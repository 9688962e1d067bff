"""The task `mutate`."""

from __future__ import annotations

import nox

from tasks.environment import run, task


@task(default=False)
def mutate(session: nox.Session) -> None:
    """Plant faults in a layer, see which live: `-- ddp --sample 50`; resumes; `--keep` records."""
    run(session, "python", "-m", "tasks.mutation.running", *session.posargs)
