"""How many processes fit on this machine, for tasks and for environments that have no nox."""

from __future__ import annotations

import os

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers(dist: str) -> list[str]:
    """Options of pytest-xdist: ranks wait for each other a lot, so three tests fit on two cores."""
    return ["-n", str(min(max(CORES // 2, 3), 8)), "--dist", dist] if CORES >= 2 else []
