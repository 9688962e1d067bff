"""On a machine with a GPU: several ranks share it over gloo; NCCL as far as there are devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("cuda_ranks.py")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run(*arguments: str) -> None:
    # Fresh processes: CUDA cannot be used in forked ones.
    command = [sys.executable, str(PROGRAM), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


def test_ranks_that_share_a_gpu_over_gloo():
    run()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_rank_per_gpu_over_nccl():
    run("nccl")
