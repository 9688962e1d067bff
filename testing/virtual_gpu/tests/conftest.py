"""Tests of the virtual GPU run in its own environment: `python3 noxfile.py -s virtual-gpu`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = importlib.util.find_spec("lamina_virtual_gpu") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]


@pytest.fixture
def program(tmp_path: Path) -> Callable[..., Any]:
    """Run a program in a process of its own, with settings, and return what it prints as JSON."""

    def run(text: str, /, launcher: tuple[str, ...] = (), **settings: object) -> Any:
        path = tmp_path / "program.py"
        path.write_text(textwrap.dedent(text))
        env = {**os.environ, **{name: str(value) for name, value in settings.items()}}
        answer = subprocess.run(
            [sys.executable, *launcher, str(path)],
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert answer.returncode == 0, answer.stderr[-3000:]
        return json.loads(answer.stdout.splitlines()[-1])

    return run


@pytest.fixture(autouse=True)
def fresh_record() -> None:
    """Each test reads what it has asked itself."""
    import torch

    import lamina_virtual_gpu as virtual_gpu

    torch.cuda.synchronize()
    virtual_gpu.reset()
