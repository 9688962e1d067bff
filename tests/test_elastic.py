"""A job that is killed and goes on elsewhere ends where an undisturbed one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"


@pytest.mark.slow
def test_random_kills_resumed_on_other_ranks_end_at_the_same_bits():
    kills = os.environ.get("LAMINA_TEST_KILLS", "6")
    command = [sys.executable, str(KILLS), "--kills", kills, "--steps", str(5 * int(kills))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    digests = {line.split()[-1] for line in done.stdout.splitlines() if "ranks, step" in line}
    digests |= {line.split()[-1] for line in done.stdout.splitlines() if "ended by" in line}
    assert len(digests) == 1
    assert f"killed {kills} times" in done.stdout
