"""Worlds of 1 to 8 ranks, every rank a process whose strings hash in its own way."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lamina.checkpoint import compare_checkpoints

pytest.importorskip("lamina.models")
sys.path.insert(0, str(Path(__file__).parent))
from test_layouts import is_order_of_names
from worlds_driver import WORLDS, size


@pytest.mark.slow
def test_a_checkpoint_goes_from_world_to_world_without_a_bit_changed(tmp_path):
    driver = Path(__file__).with_name("worlds_driver.py")
    assert {size(world) for world in WORLDS} == set(range(1, 9))
    for number, world in enumerate(WORLDS):
        ranks = [
            subprocess.Popen(
                [sys.executable, str(driver), str(tmp_path), str(number), str(rank)],
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONHASHSEED": str(rank + 1), "OMP_NUM_THREADS": "1"},
            )
            for rank in range(size(world))
        ]
        errors = [process.communicate(timeout=200)[1] for process in ranks]
        assert not any(process.returncode for process in ranks), "\n".join(errors)[-6000:]
        found = compare_checkpoints(
            tmp_path / "run" / "step-00000000", tmp_path / "run" / f"step-{number:08d}"
        )
        assert not [d for d in found if not is_order_of_names(d)], (world, found)
