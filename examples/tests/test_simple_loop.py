from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from lamina_testing.programs import run_ranks

LOOP = Path(__file__).parents[1] / "simple_loop.py"
AXES = Path(__file__).parents[1] / "four_axes.py"


def test_the_shortest_loop_trains_on_two_ranks(rank_server):
    assert len(LOOP.read_text().splitlines()) < 60
    first, second = rank_server.call(run_ranks, words=[str(LOOP)], nproc=2)
    assert (first.code, second.code) == (0, 0), first.output + second.output
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", first.output + second.output)]
    assert len(losses) == 6
    assert losses[-1] < 0.6 * losses[0]


def train_over(rank_server, axes: str, ranks: int) -> list[tuple[float, float]]:
    """The losses and norms that the loop over four axes prints."""
    ended = rank_server.call(run_ranks, words=[str(AXES), *axes.split()], nproc=ranks)
    output = "".join(each.output for each in ended)
    assert [each.code for each in ended] == [0] * ranks, output
    found = re.findall(r"loss (\d+\.\d+), gradient norm (\d+\.\d+)", output)
    return [(float(loss), float(norm)) for loss, norm in found]


@pytest.mark.slow
def test_one_loop_over_its_axes_trains_to_the_numbers_of_one_process(rank_server):
    assert len(AXES.read_text().splitlines()) <= 60
    alone = train_over(rank_server, "", 1)
    assert len(alone) == 4
    assert alone[-1][0] < 0.7 * alone[0][0]
    for found, expected in zip(train_over(rank_server, "tp=2 pp=2", 4), alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_torchrun_starts_the_loop_over_more_axes_and_ranks(rank_server):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
    words += [str(AXES), "dp_shard=-1", "cp=2", "tp=2", "pp=1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss (\d+\.\d+), gradient norm (\d+\.\d+)", done.stdout)
    # A rank prints the loss of its own samples, and the norm of the whole gradient.
    expected = [norm for _, norm in train_over(rank_server, "", 1)]
    assert [float(norm) for _, norm in found] == pytest.approx(expected, rel=1e-3)
