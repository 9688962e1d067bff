"""Installing one layer brings what lies beneath it, nothing above, and it works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tasks.bootstrap import LAYERS, ROOT
from tasks.clean_install import (
    build_wheels,
    closure,
    gather,
    layers_of,
    make_environment,
    unpack,
)
from tasks.snippets import snippets

CHECK = """
import importlib, importlib.util, sys
for layer in {present}:
    importlib.import_module("lamina." + layer)
for layer in {absent}:
    if importlib.util.find_spec("lamina." + layer) is not None:
        sys.exit(f"lamina.{{layer}} is here too")
where = importlib.import_module("lamina.{layer}").__file__
if where.startswith({tree!r}):
    sys.exit(f"{{where}} is the tree's")
"""


def check(layer: str) -> str:
    """Program that fails unless the layer and those beneath it import and the others are absent."""
    present = layers_of(layer)
    absent = [other for other in LAYERS if other not in present]
    return CHECK.format(layer=layer, present=present, absent=absent, tree=str(ROOT))


def install_line(layer: str) -> str:
    """The command that README's table has for a layer."""
    (row,) = re.findall(rf"(?m)^\| \[{layer}\].*", (ROOT / "README.md").read_text())
    return row.split("`")[-2]


@pytest.mark.parametrize("layer", LAYERS)
def test_install_line_in_the_readme_names_the_layer_and_all_beneath_it(layer):
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\n' {install_line(layer)}"], capture_output=True, text=True
    ).stdout.split("\n")
    paths = [f"./packages/{name}" for name in layers_of(layer)]
    assert words == ["pip", "install", *paths, ""]


@pytest.fixture(scope="module")
def torch_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with torch and what torch needs."""
    return gather(closure("torch").values(), tmp_path_factory.mktemp("torch") / "only")


def test_layers_need_only_layers_beneath_them():
    for layer in LAYERS:
        assert layers_of(layer)[-1] == layer
    assert layers_of("fsdp") == list(LAYERS[:5])


def run_check(layer: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run the check with the standard library and `paths` to import from, and nothing else."""
    program = f"import sys\nsys.path += {[str(path) for path in paths]}\n{check(layer)}"
    return subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True)


@pytest.mark.slow
def test_wheels_of_a_layer_work_with_nothing_but_torch(torch_only, tmp_path):
    wheels = build_wheels(layers_of("fsdp"), tmp_path / "wheels")
    run = run_check("fsdp", unpack(wheels, tmp_path / "site"), torch_only)
    assert run.returncode == 0, run.stderr


def test_the_check_sees_a_layer_that_should_be_absent(torch_only, tmp_path):
    wheels = build_wheels(["mesh", "buffers"], tmp_path / "wheels")
    run = run_check("mesh", unpack(wheels, tmp_path / "site"), torch_only)
    assert run.returncode == 1
    assert "lamina.buffers is here too" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_install_line_in_the_readme_brings_a_working_layer(layer, torch_only, tmp_path):
    line = install_line(layer)
    python = make_environment(tmp_path / "env", torch_only, pip=True)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run([python, "-c", check(layer)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (snippet,) = snippets(ROOT / "packages" / layer / "README.md")
    command = [python, "-c", snippet.source]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
