"""Where the download is out of reach, that is said, and it is no failure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lamina_virtual_gpu.__main__ import OUT_OF_REACH


def test_an_index_that_is_not_there_is_told_in_a_sentence(tmp_path: Path):
    nowhere = "http://127.0.0.1:9/simple"
    settings = {"PIP_INDEX_URL": nowhere, "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    sources = str(Path(__file__).resolve().parents[1] / "src")  # a folder where torch is not
    python = getattr(sys, "_base_executable", sys.executable)
    answer = subprocess.run(
        [python, "-m", "lamina_virtual_gpu", "setup", str(tmp_path / "environment")],
        env={**env, "PYTHONPATH": sources, **settings},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert answer.returncode == OUT_OF_REACH, answer.stderr
    (sentence,) = answer.stderr.strip().splitlines()
    assert sentence.startswith("pip could not install --no-deps torch===2.14.1")
    assert "No matching distribution found" in sentence
