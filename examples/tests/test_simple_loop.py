from __future__ import annotations

import re
from pathlib import Path

from lamina_testing.programs import run_ranks

LOOP = Path(__file__).parents[1] / "simple_loop.py"


def test_the_shortest_loop_trains_on_two_ranks(rank_server):
    assert len(LOOP.read_text().splitlines()) < 60
    first, second = rank_server.call(run_ranks, words=[str(LOOP)], nproc=2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", first.output + second.output)]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]
