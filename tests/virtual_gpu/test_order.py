"""The order of streams, as torch's trace of CUDA tells it: `-s virtual-gpu -- order` has it all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCENARIOS = Path(__file__).resolve().parents[1] / "order_scenarios.py"


def test_a_step_has_no_race_and_each_wait_is_needed():
    """The program ends with 1 for a race, and for a wait whose deletion makes none."""
    answer = subprocess.run(
        [sys.executable, str(SCENARIOS), "--cuda", "strategy 3", "dropped handles"],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-2000:]
    names = [line.split(" | ")[0] for line in answer.stdout.splitlines()]
    assert names[:2] == ["strategy 3", "dropped handles"]
    assert ", 0 deletions unseen" in names[2]
