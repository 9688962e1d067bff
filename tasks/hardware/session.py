"""The tasks `gpu` and `validate` for `nox -s`; `noxfile.py` runs them without nox."""

from __future__ import annotations

import nox

from tasks.hardware.command import main


@nox.session(venv_backend="none", default=False)
def gpu(session: nox.Session) -> None:
    """All that one NVIDIA GPU shows, in 9 minutes: `-- kernels`, `step`, ...; `-- --rehearse`."""
    if main("gpu", session.posargs):
        session.error("see the report")


@nox.session(venv_backend="none", default=False)
def validate(session: nox.Session) -> None:
    """NCCL between all GPUs of this host, then the plan of `gpu`: one report to share."""
    if main("validate", session.posargs):
        session.error("see the report")
