"""The virtual clock beside a GPU: the 1b rows of `benchmarks/real_gpu.py`, which an H200 ran.

`real_step.json` is what it printed there on 2026-11-26. The clock's rates were read from these
rows; those of 8b judged them (docs/virtual-gpu.md), and take too long for a test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TORCH = tuple(int(part) for part in version("torch").split(".")[:2])
# Since torch 2.15 the two workspaces of cuBLAS are no memory of the allocator.
# It cuts its free blocks otherwise, and records one event more.
WORKSPACES, NEAR, MORE = (0.0, 0.001, 0) if TORCH < (2, 15) else (0.062, 0.1, 1)  # GiB, events
HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ENGINES = ("fsdp2", "lamina-3")
WITHIN = 0.05  # of the real step
RATIO_WITHIN = 0.015  # of Lamina's seconds over FSDP2's


@pytest.fixture(scope="module")
def real() -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = json.loads((HERE / "real_step.json").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def virtual() -> dict[str, dict[str, float]]:
    env = {**os.environ, "VGPU_GPU": "h200", "PYTHONPATH": str(ROOT / "testing" / "src")}
    command = [sys.executable, str(ROOT / "benchmarks" / "real_gpu.py"), "1b"]
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    rows: dict[str, dict[str, float]] = json.loads(answer.stdout)["rows"]
    return rows


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_takes_as_long_and_as_much_memory_as_on_a_gpu(engine, virtual, real):
    seen, there = virtual[f"1b on 8, {engine}"], real[f"1b on 8, {engine}"]
    for memory in ("allocated, GiB", "reserved, GiB"):
        assert seen[memory] == pytest.approx(there[memory] - WORKSPACES, abs=NEAR)
    assert abs(seen["events recorded"] - there["events recorded"]) <= MORE
    assert seen["seconds"] == pytest.approx(there["seconds"], rel=WITHIN)


def test_lamina_is_to_fsdp2_what_it_is_on_a_gpu(virtual, real):
    def ratio(rows):
        ours, theirs = (rows[f"1b on 8, {engine}"]["seconds"] for engine in reversed(ENGINES))
        return ours / theirs

    assert ratio(virtual) == pytest.approx(ratio(real), abs=RATIO_WITHIN)
