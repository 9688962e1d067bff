"""What the packages' metadata say is what their sources do."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
from tasks.torches import in_range, lowest_bounds, range_of_tree, supported

from lamina.mesh.launching.doctor import TORCH_SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")
TRIED = (ROOT / "docs/records/elsewhere.md").read_text()
# Distributions whose import name is another one.
IMPORT_NAMES = {
    "pytorch-lightning": "pytorch_lightning",
    "spmd-types": "spmd_types",
    "transformer-engine": "transformer_engine",
}


def project(layer: str) -> dict:
    return tomllib.loads((ROOT / "packages" / layer / "pyproject.toml").read_text())["project"]


def named(requirement: str) -> str:
    """Import name of what a requirement asks for: `lamina-mesh>=0.1,<0.2` is `lamina.mesh`."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
    return IMPORT_NAMES.get(name, name.replace("lamina-", "lamina."))


def imported(layer: str) -> set[str]:
    """What a layer's modules import, anywhere in them: `torch`, `lamina.mesh`."""
    found = set()
    for path in (ROOT / "packages" / layer / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                parts = name.split(".")
                found.add(".".join(parts[: 2 if parts[0] == "lamina" else 1]))
    return found - set(sys.stdlib_module_names) - {f"lamina.{layer}", "__future__"}


@pytest.mark.parametrize("layer", LAYERS)
def test_everything_imported_is_declared(layer):
    data = project(layer)
    declared = {named(text) for text in data["dependencies"]}
    for extra in data.get("optional-dependencies", {}).values():
        declared |= {named(text) for text in extra}
    assert not imported(layer) - declared


@pytest.mark.parametrize("layer", LAYERS)
def test_requirements_are_layers_beneath_and_torch_in_the_supported_range(layer):
    for text in project(layer)["dependencies"]:
        if named(text) == "torch":
            assert text == "torch>=2.11,<2.16"
        elif not text.startswith("lamina-"):
            # torch does without numpy, but its object collectives (and so its DCP) do not
            assert (layer, named(text)) == ("checkpoint", "numpy")
        else:
            other = named(text).removeprefix("lamina.")
            assert LAYERS.index(other) < LAYERS.index(layer)
            major, minor, _ = map(int, project(other)["version"].split("."))
            assert text == f"lamina-{other}>={major}.{minor},<{major}.{minor + 1}"


@pytest.mark.parametrize("layer", LAYERS)
def test_supported_pythons_are_declared(layer):
    data = project(layer)
    assert data["requires-python"] == ">=3.11"
    words = [text.rpartition(" :: ")[2] for text in data["classifiers"]]
    declared = [word for word in words if word.startswith("3.")]
    rows = re.findall(r"(?m)^\| (3\.\d+)\S* \| \d.* passed.* \| as they should be \|$", TRIED)
    assert declared == sorted(set(rows)), "docs/records/elsewhere.md has other ones that passed"


def test_the_doctor_and_the_tasks_take_the_range_of_torch_from_what_is_declared():
    low, high = (".".join(map(str, version)) for version in TORCH_SUPPORTED)
    assert range_of_tree() == f">={low},<{high}"
    assert supported() == ["2.11", "2.12", "2.13", "2.14", "2.15"]
    assert in_range("2.15.0+cpu")
    assert not in_range("2.16.0a0")


def test_lowest_bounds_hold_what_the_packages_require_of_others():
    bounds = dict(text.split("==") for text in lowest_bounds())
    assert bounds["numpy"] == "2.0.*"
    assert not [name for name in bounds if name.startswith(("lamina", "torch"))]
    declared = [re.match(r"[\w.-]+", text)[0] for text in project("models")["dependencies"]]
    extras = project("models")["optional-dependencies"].values()
    declared += [re.match(r"[\w.-]+", text)[0] for extra in extras for text in extra]
    assert {name for name in declared if not name.startswith(("lamina", "torch"))} <= set(bounds)


@pytest.mark.parametrize("layer", LAYERS)
def test_changelog_opens_with_the_version(layer):
    lines = (ROOT / "packages" / layer / "CHANGELOG.md").read_text().splitlines()
    newest = next(line for line in lines if line.startswith("## "))
    assert newest.split()[1] == project(layer)["version"]


@pytest.mark.parametrize("layer", LAYERS)
def test_licence_travels_with_the_package(layer):
    assert (ROOT / "packages" / layer / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
