from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[1] / "moe" / "train.py"


def test_experts_over_two_ranks_train_with_every_balance():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*launch, EXAMPLE, "--steps", "3"],
        capture_output=True,
        text=True,
        timeout=170,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [re.match(r"balanced by (.*?)  ", line).group(1).strip() for line in lines] == [
        "nothing",
        "an auxiliary loss",
        "a bias per expert",
    ]
    losses = [float(re.search(r"loss (\d+\.\d+)", line).group(1)) for line in lines]
    assert all(3.0 < loss < 6.0 for loss in losses)
    assert all("66% of the parameters a rank" in line for line in lines)
