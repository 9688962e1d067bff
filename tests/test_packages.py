"""What the packages' metadata say is what their sources do."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")
# Distributions whose import name is another one.
IMPORT_NAMES = {"transformer-engine": "transformer_engine"}


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
            assert text == "torch>=2.11,<2.14"
        elif not text.startswith("lamina-"):
            # torch does without numpy, but its object collectives (and so its DCP) do not
            assert (layer, named(text)) == ("checkpoint", "numpy")
        else:
            other = named(text).removeprefix("lamina.")
            assert LAYERS.index(other) < LAYERS.index(layer)
            major, minor, _ = map(int, project(other)["version"].split("."))
            assert text == f"lamina-{other}>={major}.{minor},<{major}.{minor + 1}"


@pytest.mark.parametrize("layer", LAYERS)
def test_changelog_opens_with_the_version(layer):
    lines = (ROOT / "packages" / layer / "CHANGELOG.md").read_text().splitlines()
    newest = next(line for line in lines if line.startswith("## "))
    assert newest.split()[1] == project(layer)["version"]


@pytest.mark.parametrize("layer", LAYERS)
def test_licence_travels_with_the_package(layer):
    assert (ROOT / "packages" / layer / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_constraints_name_every_layer():
    text = (ROOT / "constraints.txt").read_text()
    lines = [f"lamina-{layer} @ file://${{PWD}}/packages/{layer}" for layer in LAYERS]
    assert all(line in text.splitlines() for line in lines)
