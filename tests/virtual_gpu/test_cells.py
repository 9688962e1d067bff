"""`--backend nccl`: what the cells of NCCL run, and that one test follows another."""

from __future__ import annotations

import os
import subprocess
import sys

SUITE = """
import pytest
import torch
import torch.distributed as dist

from lamina_testing import device_type

@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [False, True])
def test_a_body_that_names_no_device_is_on_its_ranks_gpu(again, ranks):
    assert device_type() == "cuda"
    assert torch.ones(3).device == torch.nn.Linear(2, 2).weight.device == ranks.device
    drawn = torch.randn(3, generator=torch.Generator().manual_seed(1))
    assert drawn.device == ranks.device
    assert dist.get_backend_config(dist.group.WORLD) == "cpu:gloo,cuda:nccl"
    with torch.device("meta"):
        assert torch.ones(3).is_meta

@pytest.mark.ranks(2, backend="gloo")
def test_a_body_of_gloo_alone_is_left_out():
    raise AssertionError
"""


def test_bodies_of_any_device_run_on_gpus_one_after_another(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    words = ["-m", "pytest", "-p", "lamina_testing.plugin", "-p", "no:cacheprovider", "-v"]
    answer = subprocess.run(
        [sys.executable, *words, "--backend", "nccl", "--world-size", "2", "test_suite.py"],
        cwd=tmp_path,
        env={**os.environ, "VGPU_DEVICES": "2", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert answer.returncode == 0, answer.stdout[-3000:]
    assert "2 passed, 1 deselected" in answer.stdout
