"""A wait that is left out is seen: by a race, an error, or a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("left_out.py")


SEEDS = 20


def rows_of(*words: str, seed: int = 0) -> list[dict[str, Any]]:
    """Run scenarios under a seed; return what they said and what their waits showed."""
    order = {"VGPU_COMPUTE": "adversarial", "VGPU_SEED": str(seed), "VGPU_SHARE": "0"}
    answer = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        env={**os.environ, **order},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_each_wait_of_a_step_is_missed_when_it_is_left_out():
    """The step with all its waits says nothing; twenty seeds at most show each left out."""
    for row in rows_of("strategy 3", "dropped handles"):
        assert row["says"] == []
        assert len(row["shown"]) > 1
        for wait in (wait for wait, how in row["shown"].items() if not how):
            line = wait.split()[0]
            again = (rows_of(row["scenario"], "--only", line, seed=n) for n in range(1, SEEDS))
            assert any(later["shown"].get(wait) for (later,) in again), wait


def test_a_backward_on_another_stream_waits_for_what_it_reads_and_its_caller_for_it():
    """With all its waits it has no race; without the last of them it has one."""
    (row,) = rows_of("a backward on another stream", "--only", "BackwardStream")
    assert row["says"] == []
    ends = [how for wait, how in row["shown"].items() if wait.endswith("BackwardStream.end")]
    assert ends
    assert all(ends)


def test_a_gradient_from_another_stream_is_waited_for_and_kept():
    """The bucket is filled on the backward's stream, and the gradient was made on another one."""
    (row,) = rows_of("DDP, a branch beside a stream of its own", "--only", "BackwardStream.entered")
    assert row["says"] == []
    assert len(row["shown"]) == 2
    assert all(row["shown"].values()), row["shown"]
