"""The task `elsewhere`."""

from __future__ import annotations

import nox

from tasks.elsewhere.command import main


@nox.session(venv_backend="none", default=False)
def elsewhere(session: nox.Session) -> None:
    """All this as another user, in another path, on each Python: `-- 3.14`, `-- --sample 400`."""
    if main(session.posargs):
        session.error("what failed elsewhere is said above")
