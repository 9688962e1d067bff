"""The task `peers`."""

from __future__ import annotations

import nox

from tasks.bootstrap import ready
from tasks.environment import run, task


@task(default=False)
def peers(session: nox.Session) -> None:
    """Torch's own tests of FSDP2, DDP and DCP over Lamina: `-- PATH/TO/PYTORCH`; resumes."""
    python = ready("peers", "-r", "requirements/peers.txt")
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    env = {"LAMINA_PEER_PACKAGES": str(packages)}
    run(session, "python", "-m", "tasks.peers.running", *session.posargs, env=env)
