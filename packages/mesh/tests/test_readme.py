"""README's snippet runs as it stands, in a world of one, and prints what README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_snippet_runs() -> None:
    text = README.read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environ = {name: value for name, value in os.environ.items() if name not in launcher}
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        env={**environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert done.stdout == printed
