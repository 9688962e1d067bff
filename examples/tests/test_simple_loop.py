from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LOOP = Path(__file__).parents[1] / "simple_loop.py"


def test_the_shortest_loop_trains_on_two_ranks():
    assert len(LOOP.read_text().splitlines()) < 60
    run = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", LOOP],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
