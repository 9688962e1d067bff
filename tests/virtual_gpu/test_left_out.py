"""A wait that is left out is seen: by a race, an error, or a wrong number."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("left_out.py")


def test_each_wait_of_a_step_is_missed_when_it_is_left_out():
    """The step with all its waits says nothing; seed 0 shows each that is left out."""
    answer = subprocess.run(
        [sys.executable, str(PROGRAM), "strategy 3", "dropped handles"],
        env={**os.environ, "VGPU_COMPUTE": "adversarial", "VGPU_SHARE": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    rows = [json.loads(line) for line in answer.stdout.splitlines()]
    assert [row["says"] for row in rows] == [[], []]
    assert {wait: how for row in rows for wait, how in row["shown"].items() if not how} == {}
    assert [len(row["shown"]) > 2 for row in rows] == [True, True]
