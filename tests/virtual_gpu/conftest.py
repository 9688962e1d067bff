"""Lamina on the virtual GPU, as rank 0 of eight: `python3 noxfile.py -s virtual-gpu` runs them."""

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

HERE = Path(__file__).resolve().parent
if importlib.util.find_spec("lamina_virtual_gpu") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def order_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test's program compute in the order that the test names, and not in pytest's.

    Rank 0 alone would wait for its peers, and a program may look at its races itself.
    """
    for name in ("VGPU_COMPUTE", "VGPU_SEED", "VGPU_RACES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def on_rank_0(tmp_path: Path) -> Callable[..., Any]:
    """Run a program that begins with `start()` of `one_of_eight`, and return what it ends with."""

    def run(text: str, launcher: tuple[str, ...] = (), **settings: object) -> Any:
        path = tmp_path / "program.py"
        path.write_text("from one_of_eight import *\n" + textwrap.dedent(text))
        given = filter(None, (os.environ.get("PYTHONPATH"),))  # a copy of a layer with a fault
        folders = (HERE, HERE.parent, HERE.parents[1] / "benchmarks")
        paths = os.pathsep.join([*given, *map(str, folders)])
        env = {**os.environ, "PYTHONPATH": paths, **{k: str(v) for k, v in settings.items()}}
        command = [sys.executable, *launcher, str(path)]
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=580)
        assert answer.returncode == 0, answer.stderr[-3000:]
        return json.loads(answer.stdout.splitlines()[-1])

    return run
