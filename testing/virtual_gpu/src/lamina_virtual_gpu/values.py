"""No arithmetic: what a test says of values that the device would have computed is left out.

`VGPU_VALUES=unknown` switches it on for pytest. An assert that fails is passed over, and counted,
if it read a number from a device, or if it is about tensors or floats. All other asserts count:
errors, memory, addresses, launches, waits, order.
"""

# Note [Asserts about values]
#
# pytest compiles each assert into statements of its own. Before it does, each assert is put into
# `try`, and so is each call that stands alone, since helpers assert too. If an AssertionError comes
# out, `judge` looks at it. It is passed over if one of these holds:
# - the statement has copied from a device to the host (`item`, `torch.equal`, a comparison's bool);
# - a name in the assert that failed stands for a tensor, for a float, or for a collection of them.
#   Such an assert compares what was brought to the host earlier.
# The body of a test is put into `try` as well, because a helper's result may have to be there for
# the test to go on. Such a test is skipped from there. `torch.testing` compares all but the values.

from __future__ import annotations

import ast
import ctypes
import functools
import linecache
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from lamina_virtual_gpu.activate import LIBRARY_FOLDER

__all__ = ["judge", "judge_test", "reads", "rewriting"]

MODULE, BEFORE, ERROR = "@virtual_gpu_values", "@virtual_gpu_before", "@virtual_gpu_error"
SEARCHED = 200  # entries of a collection that are looked at


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY_FOLDER / "libcudart.so.13"))
    library.vgpu_reads.restype = ctypes.c_ulonglong
    return library


def reads() -> int:
    """Return how many copies from a device to the host this process has made."""
    return int(_library().vgpu_reads())


def judge(error: AssertionError, before: int) -> None:
    """Pass over an assert about values; raise any other error again."""
    if reads() == before and not about_values(error.__traceback__):
        raise error


def judge_test(error: AssertionError) -> None:
    """End a test at an assert about values; raise any other error again."""
    if not about_values(error.__traceback__):
        raise error
    import pytest

    pytest.skip("no arithmetic: the rest of the test depends on values")


def about_values(traceback: TracebackType | None) -> bool:
    """Whether the assert that failed names tensors or floats."""
    last = None
    while traceback is not None:
        last, traceback = traceback, traceback.tb_next
    return last is not None and any(map(is_value, named(last.tb_frame, last.tb_lineno)))


def named(frame: FrameType, line: int) -> list[Any]:
    """Return what the names and attributes of the assert at a line stand for."""
    found = []
    for node in statements(frame.f_code.co_filename):
        if isinstance(node, ast.Assert) and node.lineno <= line <= (node.end_lineno or node.lineno):
            for part in ast.walk(node):
                try:
                    found.append(resolved(part, frame))
                except Exception:  # what cannot be looked up is no value
                    continue
    return found


@functools.cache
def statements(file: str) -> list[ast.AST]:
    """Return all nodes of a file's syntax tree."""
    return list(ast.walk(ast.parse("".join(linecache.getlines(file)))))


def resolved(node: ast.AST, frame: FrameType) -> Any:
    """Return what a name, or an attribute of one, stands for."""
    if isinstance(node, ast.Name):
        scopes: tuple[Mapping[str, Any], ...] = (frame.f_locals, frame.f_globals)
        return next(scope[node.id] for scope in scopes if node.id in scope)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, frame), node.attr)
    raise LookupError(node)


def is_value(what: Any, depth: int = 3) -> bool:
    """Whether something is a tensor or a float, or holds one."""
    import torch

    if isinstance(what, (torch.Tensor, float, complex)):
        return True
    if depth and isinstance(what, Mapping):
        what = list(what.values())
    if depth and isinstance(what, (list, tuple, set)):
        return any(is_value(part, depth - 1) for part in list(what)[:SEARCHED])
    return False


# ------------------------------------------------------------------------- the rewriting of tests


def rewriting(rewrite: Callable[..., None]) -> Callable[..., None]:
    """Return pytest's `rewrite_asserts` with every assert in a `try` of its own."""

    @functools.wraps(rewrite)
    def rewrite_asserts(tree: ast.Module, *arguments: Any, **options: Any) -> None:
        Guard().visit(tree)
        place = next((i for i, node in enumerate(tree.body) if not is_preface(node)), 0)
        imported = ast.Import([ast.alias("lamina_virtual_gpu.values", MODULE)])
        tree.body.insert(place, imported)
        for node in ast.walk(imported):
            ast.copy_location(node, tree.body[-1])
        ast.fix_missing_locations(tree)
        rewrite(tree, *arguments, **options)

    return rewrite_asserts


def is_preface(node: ast.stmt) -> bool:
    """Whether a statement is the docstring, or an import from `__future__`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def call(name: str, *arguments: str) -> ast.Expr:
    """Return `values.NAME(ARGUMENTS)` as a statement."""
    function = ast.Attribute(ast.Name(MODULE, ast.Load()), name, ast.Load())
    return ast.Expr(ast.Call(function, [ast.Name(word, ast.Load()) for word in arguments], []))


def tried(body: list[ast.stmt], judgement: ast.Expr) -> ast.Try:
    """Return `try: BODY except AssertionError as error: JUDGEMENT`."""
    handler = ast.ExceptHandler(ast.Name("AssertionError", ast.Load()), ERROR, [judgement])
    return ast.Try(body, [handler], [], [])


class Guard(ast.NodeTransformer):
    """Puts asserts, calls that stand alone, and tests into `try`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.name.startswith("test_"):
            node.body = [tried(node.body, call("judge_test", ERROR))]
        located(node, node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        # The names of a class's body are its attributes: only its functions are changed.
        node.body = [self.visit(part) if isinstance(part, ast.FunctionDef) else part
                     for part in node.body]  # fmt: skip
        return node

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        return self.guarded(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        return self.guarded(node) if isinstance(node.value, ast.Call) else node

    def guarded(self, node: ast.stmt) -> list[ast.stmt]:
        """Return the statement in a `try`, after a note of how much was read so far."""
        note = ast.Assign([ast.Name(BEFORE, ast.Store())], call("reads").value)
        after = tried([node], call("judge", ERROR, BEFORE))
        located(note, node)
        located(after, node)
        return [note, after]


def located(made: ast.AST, at: ast.AST) -> None:
    """Give what was made the place of a statement, where it has none."""
    for node in ast.walk(made):
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            ast.copy_location(node, at)
