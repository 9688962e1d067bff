from __future__ import annotations

import re
from pathlib import Path

import pytest

from lamina_testing.programs import run_ranks

EXAMPLE = Path(__file__).parents[1] / "moe" / "train.py"


@pytest.mark.slow
def test_experts_over_two_ranks_train_with_every_balance(rank_server):
    words = [str(EXAMPLE), "--steps", "3"]
    first, second = rank_server.call(run_ranks, words=words, nproc=2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    lines = first.stdout.splitlines()
    assert [re.match(r"balanced by (.*?)  ", line).group(1).strip() for line in lines] == [
        "nothing",
        "an auxiliary loss",
        "a bias per expert",
    ]
    losses = [float(re.search(r"loss (\d+\.\d+)", line).group(1)) for line in lines]
    assert all(3.0 < loss < 6.0 for loss in losses)
    assert all("66% of the parameters a rank" in line for line in lines)
