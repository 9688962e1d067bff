"""A wait that is left out is seen: by a race, an error, or a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("left_out.py")


def rows_of(*words: str) -> list[dict[str, Any]]:
    """Run scenarios under seed 0; return what they said and what their waits showed."""
    answer = subprocess.run(
        [sys.executable, str(PROGRAM), *words],
        env={**os.environ, "VGPU_COMPUTE": "adversarial", "VGPU_SHARE": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


def test_each_wait_of_a_step_is_missed_when_it_is_left_out():
    """The step with all its waits says nothing; seed 0 shows each that is left out."""
    rows = rows_of("strategy 3", "dropped handles")
    assert [row["says"] for row in rows] == [[], []]
    assert {wait: how for row in rows for wait, how in row["shown"].items() if not how} == {}
    assert [len(row["shown"]) > 1 for row in rows] == [True, True]


def test_a_backward_on_another_stream_waits_for_what_it_reads_and_its_caller_for_it():
    """With all its waits it has no race; without the last of them it has one."""
    (row,) = rows_of("a backward on another stream", "--only", "BackwardStream")
    assert row["says"] == []
    ends = [how for wait, how in row["shown"].items() if wait.endswith("BackwardStream.end")]
    assert ends
    assert all(ends)
