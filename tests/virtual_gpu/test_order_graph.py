"""The order of streams that a virtual GPU has shown is compared with that of a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "order_on_gpu.py"
SCENARIOS = ("strategy 3", "dropped handles")


def run(*words: str) -> str:
    command = [sys.executable, str(PROGRAM), *words, *SCENARIOS]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_two_runs_have_one_order_and_what_one_of_them_lacks_is_said(tmp_path):
    path = tmp_path / "order.json"
    assert "no graph of a virtual GPU" in run("--beside", str(path))
    run("--write", str(path))
    assert "2 of 2 scenarios have the order of the virtual GPU" in run("--beside", str(path))
    graphs = json.loads(path.read_text())
    entries, *_ = graphs["strategy 3"]["order"].values()
    wait = next(entry for entry in entries if entry.startswith("wait"))
    entries.remove(wait)
    path.write_text(json.dumps(graphs))
    said = run("--beside", str(path))
    assert "1 of 2 scenarios have the order of the virtual GPU" in said
    assert f"this GPU has {wait}; the virtual GPU does not" in said
