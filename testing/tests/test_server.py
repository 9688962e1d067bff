"""What the fork server keeps from one job to the next."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from lamina_testing.jobs import RankOutcome
from lamina_testing.server import gpus_alone
from lamina_testing.supervision import Supervision


def test_ranks_that_wait_for_their_next_job_do_not_keep_the_gpus_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with gpus_alone(SimpleNamespace(device="cuda")):
        (lock,) = tmp_path.iterdir()
        # A rank that is forked now has the file open too, as this copy of its descriptor has.
        files = ((int(path.name), path) for path in Path("/proc/self/fd").iterdir())
        ours = next(n for n, path in files if path.exists() and path.samefile(lock))
        of_a_rank = os.dup(ours)
    with lock.open("w") as of_the_next_job:
        fcntl.flock(of_the_next_job, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(of_a_rank)


@pytest.mark.parametrize("is_steered", [False, True])
def test_ranks_that_hang_are_skipped_if_a_number_that_nothing_computed_steered_one(
    tmp_path, is_steered
):
    """A rank of a virtual GPU without arithmetic makes the file when its program reads a number."""
    supervision = Supervision(None, SimpleNamespace(timeout=60.0), tmp_path, [])
    if is_steered:
        (tmp_path / "0.steered").touch()
    for rank, status in enumerate(("passed", "hung")):
        supervision.known[rank] = RankOutcome(rank, status, time=float(rank), text="a stack")
    supervision.skip_for_all()
    statuses = [outcome.status for outcome in supervision.known.values()]
    assert statuses == ["passed", "skipped" if is_steered else "hung"]
