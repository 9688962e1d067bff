"""A whole step in one CUDA graph, replayed on two virtual GPUs, has the bits of the step itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1")
CASES = {
    "strategies": ("0", "1", "2", "3"),
    "wrappers": ("ddp", "ddp, sharded"),
    "norms": ("clipped", "fused, clipped"),
    "microbatches": ("microbatches", "microbatches, 1"),
    "recomputation": ("full", "selective"),
    "others": ("tp", "native", "slots"),
}


def run(names: tuple[str, ...], **settings: str) -> list[str]:
    """The cases in which a replay has other bits."""
    command = [sys.executable, *TORCHRUN, "--nproc-per-node=2", str(HERE / "whole_step.py"), *names]
    env = {**os.environ, "VGPU_DEVICES": "2", "VGPU_COMPUTE": "at-once", **settings}
    answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
    assert answer.returncode == 0, answer.stderr[-3000:]
    differing: list[str] = json.loads(answer.stdout.splitlines()[-1])
    return differing


@pytest.mark.parametrize("names", CASES.values(), ids=CASES)
def test_a_replayed_step_has_the_bits_of_a_step(names):
    assert run(names) == []


@pytest.mark.parametrize("seed", range(3))
def test_and_so_it_has_in_the_worst_order(seed):
    settings = {"VGPU_COMPUTE": "adversarial", "VGPU_SEED": str(seed), "VGPU_RACES": "fail"}
    assert run(("3", "ddp, sharded"), **settings) == []
