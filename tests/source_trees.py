"""The packages' sources as syntax trees, read without importing anything."""

from __future__ import annotations

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("mesh", "buffers", "collectives", "ddp", "fsdp", "models", "checkpoint")  # lowest first
# Faces of a layer that are neither its user face nor its engine face: folders, and modules that are
# programs too.
SUB_FACES = {
    "fsdp": ("check",),
    "models": ("attention", "moe", "mamba", "vision", "parallel_types", "plan"),
}
MAX_LINES = 700


def commit() -> str:
    """The commit of this tree, as pages name it."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def source_of(layer: str) -> Path:
    return ROOT / "packages" / layer / "src" / "lamina" / layer


def sub_faces(layer: str) -> dict[str, str]:
    """Return the file of each further face of a layer, from the layer's folder."""
    faces = SUB_FACES.get(layer, ())
    return {
        face: f"{face}.py" if (source_of(layer) / f"{face}.py").is_file() else f"{face}/__init__.py"
        for face in faces
    }


@functools.cache
def tree_of(source: str) -> ast.Module:
    """Parse a text once, however many rules look at it."""
    return ast.parse(source)


@functools.cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module, in the order of `ast.walk`, which is slow and is asked once."""
    return tuple(ast.walk(tree))


@functools.cache
def names_of(tree: ast.Module) -> dict[str, str]:
    """Map every name that an import binds in the module to the dotted path it stands for."""
    bound: dict[str, str] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.split(".")[0]
                bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return bound


def dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """Full path that an expression such as `dist.new_group` stands for, or None."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        front = dotted(node.value, bound)
        return None if front is None else f"{front}.{node.attr}"
    return None


@functools.cache
def lamina_imports(tree: ast.Module) -> list[tuple[int, str, str | None]]:
    """Return (line, module, name or None) of every import of lamina, by statement or by string.

    Imports within functions and those for types are imports like any other.
    """
    bound = names_of(tree)
    imports: list[tuple[int, str, str | None]] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                if node.module == "lamina":
                    imports.append((node.lineno, f"lamina.{alias.name}", None))
                else:
                    imports.append((node.lineno, node.module, alias.name))
        elif isinstance(node, ast.Call) and dotted(node.func, bound) == "importlib.import_module":
            for word in node.args[:1]:
                imports.append((node.lineno, str(getattr(word, "value", "")), None))
    return imports


def public_face(source: str) -> frozenset[str]:
    """The names in `__all__`, read without importing the layer."""
    for node in tree_of(source).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else target
        if isinstance(target, ast.Name) and target.id == "__all__":
            return frozenset(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    return frozenset()
