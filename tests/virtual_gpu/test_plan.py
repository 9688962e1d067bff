"""A plan on meta tensors beside the same step on the virtual GPU's allocator."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_plan_has_what_the_real_allocator_allocates():
    words = "--model llama3.2-1b --ranks 2 --sequence 1024 --device --json"
    command = [sys.executable, "-m", "lamina.models.plan", *words.split()]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    planned = json.loads(answer.stdout)
    allocated = planned["device"]["allocated"]
    assert abs(planned["allocated_bytes"] / allocated - 1) < 0.02, planned
    assert planned["device"]["reserved"] >= allocated
