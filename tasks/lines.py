"""How much code each layer has, how much of it explains itself, and which classes are too large.

    python3 noxfile.py -s lines               # a row per layer
    python3 noxfile.py -s lines -- mesh fsdp  # these, with a row per file

A line of code is one that is not blank, does not begin with #, and is no part of a string that
stands alone: comments and docstrings are free. "Comments" are those inside functions, also at the
end of a line, per 100 lines of code inside functions. A class is large if it has more attributes,
or more methods, than a reader can hold in mind.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tasks.bootstrap import LAYERS, ROOT

ENGINE = LAYERS[:5]
MOST_ATTRIBUTES, MOST_METHODS = 15, 25

Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Count:
    """What a source has: lines of code, those and comments inside functions, large classes.

    A large class comes with its attributes and its methods.
    """

    code: int = 0
    bodies: int = 0
    comments: int = 0
    large: list[tuple[str, int, int]] = field(default_factory=list)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.code + other.code,
            self.bodies + other.bodies,
            self.comments + other.comments,
            [*self.large, *other.large],
        )

    @property
    def per_hundred(self) -> float:
        """Comments per 100 lines of code inside functions."""
        return 100 * self.comments / max(self.bodies, 1)


def count(source: str) -> Count:
    """Count one source."""
    tree, lines = ast.parse(source), source.splitlines()
    strings, bodies = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            strings |= _lines_of(node) if isinstance(node.value.value, str) else set()
        elif isinstance(node, Functions):
            bodies |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    found = Count()
    for number, line in enumerate(lines, start=1):
        words = line.strip()
        if not words or number in strings:
            continue
        if not words.startswith("#"):
            found.code += 1
            found.bodies += number in bodies
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    found.comments = len(comments & bodies)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            attributes, methods = set(attributes_of(node)), len(_methods_of(node))
            if len(attributes) > MOST_ATTRIBUTES or methods > MOST_METHODS:
                found.large.append((node.name, len(attributes), methods))
    return found


def _lines_of(node: ast.stmt) -> set[int]:
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _methods_of(tree: ast.ClassDef) -> list[Functions]:
    return [node for node in tree.body if isinstance(node, Functions)]


def attributes_of(tree: ast.ClassDef) -> Iterator[str]:
    """What a class stores of itself; a dataclass of settings, which has no methods, stores none."""
    methods = _methods_of(tree)
    for node in tree.body if methods else ():
        match node:
            case ast.AnnAssign(target=ast.Name(name)) if "ClassVar" not in ast.unparse(node):
                yield name
    for inner in (each for method in methods for each in ast.walk(method)):
        match inner:
            case ast.Attribute(value=ast.Name("self"), attr=name, ctx=ast.Store()):
                yield name


def count_layer(layer: str) -> dict[Path, Count]:
    """Count the files of a layer."""
    top = ROOT / "packages" / layer / "src"
    return {path.relative_to(top): count(path.read_text()) for path in sorted(top.rglob("*.py"))}


def _row(title: object, found: Count) -> str:
    return f"{title!s:60} {found.code:7,} {found.per_hundred:9.1f}"


def main(asked: list[str]) -> None:
    """Print a row for each layer, or for each file of the layers that are asked for."""
    print(f"{'':60} {'code':>7} {'comments':>9}")
    engine = Count()
    for layer in asked or LAYERS:
        files = count_layer(layer)
        whole = sum(files.values(), Count())
        engine = engine + whole if layer in ENGINE else engine
        for path, found in files.items() if asked else ():
            if found.code:
                print(_row(f"  {path}", found))
        print(_row(layer, whole))
        for name, attributes, methods in whole.large:
            print(f"  {name} has {attributes} attributes and {methods} methods")
    if not asked:
        print(_row("mesh to fsdp", engine))


if __name__ == "__main__":
    main(sys.argv[1:])
