"""noxfile.py starts where little is installed, and says what is missing."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A directory with the file and nothing else."""
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    return tmp_path


def start(place: Path, *words: str, broken: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Run the file with an interpreter in which the modules `broken` cannot be imported."""
    for name in broken:
        (place / "broken").mkdir(exist_ok=True)
        (place / "broken" / f"{name}.py").write_text(f"raise ImportError('no {name}')\n")
    env = {**os.environ, "PYTHONPATH": str(place / "broken")}
    command = [sys.executable, "noxfile.py", *words]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)


def test_a_python_that_cannot_make_environments_is_told_what_to_install(alone):
    run = start(alone, "-l", broken=("ensurepip", "pip"))
    assert run.returncode == 1
    assert "apt install python3-venv" in run.stderr
    assert not (alone / ".nox" / "bootstrap").exists()


@pytest.mark.slow
def test_a_python_without_ensurepip_is_helped_by_its_pip(alone):
    run = start(alone, "-l", broken=("ensurepip",))
    assert run.returncode == 0, run.stderr
    assert "matrix(fsdp-nccl-8)" in run.stdout


def test_what_runs_before_nox_is_there_imports_the_standard_library_alone():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    names = []
    for node in tree.body:
        if isinstance(node, ast.If):  # `if __name__ == "__main__": start()`
            break
        if isinstance(node, ast.Import | ast.ImportFrom):
            names += [node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name]
    assert names
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)
