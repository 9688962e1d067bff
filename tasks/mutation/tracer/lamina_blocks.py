"""Blocks of a source: the lists of statements in functions, each of which runs whole or not at all.

A block runs from its first statement on, until one of them raises, returns or leaves a loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Block:
    """A list of statements in a function.

    Args:
        body: the statements.
        begin: line and column of the first, or of the function if they are its body.
        end: line and column behind the last.
    """

    body: list[ast.stmt]
    begin: tuple[int, int]
    end: tuple[int, int]

    @property
    def line(self) -> int:
        """Return the line of the first statement, which names the block in its file."""
        return self.body[0].lineno


def blocks_of(node: ast.AST, inside: bool = False) -> Iterator[Block]:
    """Return the blocks of all functions below a node; a class's own statements are none."""
    for _, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        whole = bool(children) and isinstance(children[0], ast.stmt)
        if whole and (inside or isinstance(node, FUNCTIONS)) and not isinstance(node, ast.ClassDef):
            first = node if isinstance(node, FUNCTIONS) else children[0]
            last = children[-1]
            end = (last.end_lineno or last.lineno, last.end_col_offset or 0)
            yield Block(children, (first.lineno, first.col_offset), end)
        for child in children:
            if isinstance(child, ast.AST):
                yield from blocks_of(child, inside or isinstance(node, FUNCTIONS))


def instrument(tree: ast.AST, file: str, function: str) -> None:
    """Begin each block with a call of a builtin function; its argument is `file:line`."""
    for block in list(blocks_of(tree)):
        first = block.body[0]
        name = ast.Name(function, ast.Load())
        call = ast.Expr(ast.Call(name, [ast.Constant(f"{file}:{first.lineno}")], []))
        for node in ast.walk(call):
            ast.copy_location(node, first)
        docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        block.body.insert(int(docstring), call)
