"""What the server does about ranks that do not end, seen without a server."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lamina_testing import busy_clock
from lamina_testing.supervision import Member, Supervision


def seconds_until_given_up(timeout: float, place: Path) -> float:
    """Supervise one rank that sleeps, and return how long it took until it counted as hung."""
    ours, theirs = socket.socketpair()
    control, server = socket.socketpair()
    rank = subprocess.Popen(["sleep", "60"], start_new_session=True)
    job: Any = SimpleNamespace(timeout=timeout, keeps_group=False)
    with ours, theirs, control, server:
        begun = time.monotonic()
        (outcome,) = Supervision(control, job, place, [Member(0, rank.pid, ours)]).outcomes()
        passed = time.monotonic() - begun
    rank.wait()
    assert outcome.status == "hung"
    return passed


def test_a_limit_is_longer_where_a_rank_gets_little_of_a_core(tmp_path, monkeypatch):
    monkeypatch.setattr(busy_clock, "share_of_a_core", lambda: 0.1)
    assert seconds_until_given_up(0.2, tmp_path) >= 2.0
