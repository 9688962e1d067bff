"""No arithmetic: what a test says of values that the device would have computed is left out.

`VGPU_VALUES=unknown` switches it on for pytest. An assert that fails is passed over if it read a
number from a device, or if it is about tensors or floats. All other asserts count: errors, memory,
addresses, launches, waits, order. An error of the program counts, unless a number of a device
steered it: the call that it came out of had read one, or was given one by the test.
"""

# Note [Asserts about values]
#
# pytest compiles each assert into statements of its own. Before it does, each assert is put into
# `try`, and so is each call that stands alone, since helpers assert too. If an AssertionError comes
# out, `judge` looks at it. It is passed over if one of these holds:
# - the statement has copied from a device to the host (`item`, `torch.equal`, a comparison's bool);
# - a name in the assert that failed stands for a tensor, or for a collection of them.
# - the function has read from a device before, itself or in a call, and a name or a number in the
#   assert is a float, or a name is a bool: the answer of `torch.equal`. So is a dataclass that has
#   one of these, such as the answer of a comparison.
#   Such an assert compares what was brought to the host earlier.
# The body of a test is put into `try` as well, because a helper's result may have to be there for
# the test to go on. Such a test is skipped from there. So is one whose `with pytest.raises(...)`
# saw no error after a read: a NaN may not have been computed. `torch.testing` compares all but the
# values.
#
# Note [Errors from values]
#
# A program may steer by numbers of the device: a router's counts, the places of a token. They are
# zeros here, and the program stops at sizes that do not add up. The device tells of each read, and
# the functions that run then are noted, the test's own aside. A test is skipped from where an error
# came out of one of those. A test may also hand on what it read (`clip(model, float(norm) / 2)`).
# It is skipped where the line that failed has read itself, or names a float in a function that had.
#
# Note [Ranks that values part]
#
# A number may decide on one rank alone. The others then wait for a message that does not come. So
# a rank that is skipped for a value tells it (`for_all_ranks`), and the test bed ends the others.
# A rank whose program reads a number makes the file that `VGPU_STEERED` names. If ranks of such a
# job wait for ever, the test is skipped too.

from __future__ import annotations

import ast
import atexit
import ctypes
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn

from lamina_virtual_gpu.activate import LIBRARY_FOLDER

MODULE, BEFORE, ERROR = "@virtual_gpu_values", "@virtual_gpu_before", "@virtual_gpu_error"
VALUES = (float, complex)
SEARCHED, DEPTH = 200, 3  # entries of a collection that are looked at, and collections in it


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY_FOLDER / "libcudart.so.13"))
    library.vgpu_reads.restype = ctypes.c_ulonglong
    return library


def reads() -> int:
    """Return how many copies from a device to the host this process has made."""
    return int(_library().vgpu_reads())


def judge_expected(error: BaseException, before: int) -> None:
    """End a test that waited in vain for an error or a warning about values."""
    import pytest

    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    # An error whose words are others is an AssertionError of pytest's own.
    module = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    expected = isinstance(error, pytest.fail.Exception) or module.startswith("_pytest.")
    if not expected or reads() == before:
        raise error
    skip("nothing was computed that could be refused")


def skip(reason: str) -> NoReturn:
    """End a test, on the other ranks too."""
    import pytest

    skipped = pytest.skip.Exception(f"no arithmetic: {reason}")
    skipped.for_all_ranks = True  # type: ignore[attr-defined]
    raise skipped


# The calls that have read from a device since the test began, by their frames' addresses: a frame
# that was kept would keep its tensors, and tests count memory. A test's frame has nothing of this.
_readers: set[tuple[int, CodeType]] = set()
# The lines at which they read themselves, not through another function than torch's.
_lines: dict[tuple[int, CodeType], set[int]] = {}


@functools.cache
def _note_readers() -> Any:
    def note() -> None:
        frame, inside_torch = sys._getframe().f_back, True
        while frame is not None:
            key = (id(frame), frame.f_code)
            if inside_torch and not is_of_torch(frame):
                inside_torch = False
                if MODULE not in frame.f_globals and (path := os.environ.get("VGPU_STEERED")):
                    Path(path).touch()
                _lines.setdefault(key, set()).add(frame.f_lineno)
            _readers.add(key)
            frame = frame.f_back

    return ctypes.CFUNCTYPE(None)(note)


def is_of_torch(frame: FrameType) -> bool:
    """Whether a function is torch's, or the test bed's, which chooses the device of tensors."""
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "lamina_testing."))


def watch_reads() -> None:
    """Have the device tell of each read, until the interpreter ends."""
    _library().vgpu_on_read(_note_readers())
    atexit.register(_library().vgpu_on_read, None)


def begin_test() -> None:
    """Forget the calls of the test before."""
    _readers.clear()
    _lines.clear()


def judge(error: AssertionError, before: int) -> None:
    """Pass over an assert about values; raise any other error again."""
    if reads() == before and not about_values(error.__traceback__):
        raise error
    frame = sys._getframe(1)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # pytest has asked for the function's `locals()`, and Python keeps that dict in the frame:
        # a tensor would stay in it after `del`.
        frame.f_locals.clear()


def judge_test(error: Exception) -> None:
    """End a test at an error that may come from values; raise any other again."""
    traceback = error.__traceback__
    of_values = isinstance(error, AssertionError) and about_values(traceback)
    if not of_values and not steered(traceback):
        raise error
    skip("the rest of the test depends on values")


def steered(traceback: TracebackType | None) -> bool:
    """Whether the call that an error came out of has read from a device, or was given a number."""
    if any(map(has_read, program_frames(traceback))):
        return True
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        lines = _lines.get((id(frame), frame.f_code)) if MODULE in frame.f_globals else None
        given = named(frame, line, ast.Call) if lines else []
        if lines and (line in lines or any(isinstance(part, VALUES) for part in given)):
            return True
        traceback = traceback.tb_next
    return False


def has_read(frame: FrameType) -> bool:
    """Whether a call, or one that it made, has read from a device."""
    return (id(frame), frame.f_code) in _readers


def program_frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    """Yield the calls that an error came out of, tests' own left out."""
    while traceback is not None:
        if MODULE not in traceback.tb_frame.f_globals:
            yield traceback.tb_frame
        traceback = traceback.tb_next


def about_values(traceback: TracebackType | None) -> bool:
    """Whether the assert that failed names tensors or floats."""
    last = None
    while traceback is not None:
        last, traceback = traceback, traceback.tb_next
    if last is None:
        return False
    kinds = (bool, *VALUES) if has_read(last.tb_frame) else ()
    return any(is_value(part, kinds) for part in named(last.tb_frame, last.tb_lineno, ast.Assert))


def named(frame: FrameType, line: int, kind: type[ast.Assert] | type[ast.Call]) -> list[Any]:
    """Return what the names and attributes of the assert, or of the calls, at a line stand for."""
    found = []
    for node in statements(frame.f_code.co_filename):
        if isinstance(node, kind) and node.lineno <= line <= (node.end_lineno or node.lineno):
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
    """Return what a name, an attribute of one, or a number stands for."""
    if isinstance(node, ast.Name):
        scopes: tuple[Mapping[str, Any], ...] = (frame.f_locals, frame.f_globals)
        return next(scope[node.id] for scope in scopes if node.id in scope)
    if isinstance(node, ast.Attribute):
        return getattr(resolved(node.value, frame), node.attr)
    if isinstance(node, ast.Constant) and isinstance(node.value, VALUES):
        return node.value
    raise LookupError(node)


def is_value(what: Any, kinds: tuple[type, ...], depth: int = DEPTH) -> bool:
    """Whether something is a tensor or of one of some kinds, or holds such a thing."""
    import torch

    if is_dataclass(what) and not isinstance(what, type) and kinds and depth == DEPTH:
        what = [getattr(what, field.name, None) for field in fields(what)]
    if isinstance(what, (torch.Tensor, *kinds)):
        return True
    if depth and isinstance(what, Mapping):
        what = list(what.values())
    if depth and isinstance(what, (list, tuple, set)):
        return any(is_value(part, kinds, depth - 1) for part in list(what)[:SEARCHED])
    return False


# ------------------------------------------------------------------------- the rewriting of tests


def rewriting(rewrite: Callable[..., None]) -> Callable[..., None]:
    """Return pytest's `rewrite_asserts` with every assert in a `try` of its own."""

    @functools.wraps(rewrite)
    def rewrite_asserts(tree: ast.Module, *arguments: Any, **options: Any) -> None:
        _Guard().visit(tree)
        place = next((i for i, node in enumerate(tree.body) if not is_preface(node)), 0)
        imported = ast.Import([ast.alias("lamina_virtual_gpu.values", MODULE)])
        tree.body.insert(place, imported)
        for node in ast.walk(imported):
            ast.copy_location(node, tree.body[-1])
        ast.fix_missing_locations(tree)
        rewrite(tree, *arguments, **options)
        for node in ast.walk(tree):
            if isinstance(node, ast.Try) and any(part.name == ERROR for part in node.handlers):
                forget_parts(node)

    return rewrite_asserts


def forget_parts(guard: ast.Try) -> None:
    """Have an assert that is passed over let go of its parts, as one does that holds.

    pytest keeps each part in a variable. One that stayed would keep a tensor's memory, which tests
    count.
    """
    names = {
        node.id
        for statement in guard.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id[:4] == "@py_"
    }
    if names:
        targets: list[ast.expr] = [ast.Name(name, ast.Store()) for name in sorted(names)]
        empty = ast.Assign(targets, ast.Constant(None))
        located(empty, guard)
        guard.handlers[0].body.append(empty)


def is_preface(node: ast.stmt) -> bool:
    """Whether a statement is the docstring, or an import from `__future__`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def call(name: str, *arguments: str) -> ast.Expr:
    """Return `values.NAME(ARGUMENTS)` as a statement."""
    function = ast.Attribute(ast.Name(MODULE, ast.Load()), name, ast.Load())
    return ast.Expr(ast.Call(function, [ast.Name(word, ast.Load()) for word in arguments], []))


def tried(body: list[ast.stmt], errors: str, judgement: ast.Expr) -> ast.Try:
    """Return `try: BODY except ERRORS as error: JUDGEMENT`."""
    handler = ast.ExceptHandler(ast.Name(errors, ast.Load()), ERROR, [judgement])
    return ast.Try(body, [handler], [], [])


class _Guard(ast.NodeTransformer):
    """Puts asserts, calls that stand alone, expected errors and tests into `try`."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        if node.name.startswith("test_"):
            body = [call("begin_test"), *node.body]
            node.body = [tried(body, "Exception", call("judge_test", ERROR))]
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

    def visit_With(self, node: ast.With) -> list[ast.stmt]:
        # It may stand for `pytest.raises`, also by another name.
        self.generic_visit(node)
        return self.guarded(node, "BaseException", "judge_expected")

    def guarded(
        self, node: ast.stmt, errors: str = "AssertionError", judgement: str = "judge"
    ) -> list[ast.stmt]:
        """Return the statement in a `try`, after a note of how much was read so far."""
        # What is within the statement may have such a note of its own.
        before = f"{BEFORE}_{node.lineno}"
        note = ast.Assign([ast.Name(before, ast.Store())], call("reads").value)
        after = tried([node], errors, call(judgement, ERROR, before))
        located(note, node)
        located(after, node)
        return [note, after]


def located(made: ast.AST, at: ast.AST) -> None:
    """Give what was made the place of a statement, where it has none."""
    for node in ast.walk(made):
        if "lineno" in node._attributes and not hasattr(node, "lineno"):
            ast.copy_location(node, at)
