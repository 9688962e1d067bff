"""Notes which test reaches which block of the layers, in pytest and in all that it starts.

Python imports a `sitecustomize` that stands on PYTHONPATH whenever it starts, so ranks and their
fork server are seen too. Sources below LAMINA_ENTERED_PACKAGES are compiled with a call at the
begin of each block, and nothing else is slower than without. The call adds a line `layer/file:line
<tab>test` to the file named by LAMINA_ENTERED, once per process and test. Triton's interpreter
compiles kernels anew from their text, so its `compile` does the same.
"""

from __future__ import annotations

import ast
import builtins
import os
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from lamina_blocks import instrument  # type: ignore[import-not-found]  # beside this file

NOTE = "__lamina_entered__"
compiling: Callable[[], bool] = bool  # False until torch is imported


def name_of(path: str) -> str:
    """Return `layer/file` for a layer's source, and "" for other files."""
    packages = os.environ.get("LAMINA_ENTERED_PACKAGES", "")
    _, _, name = path.removeprefix(packages).partition("/src/lamina/")
    return name if path.startswith(packages) else ""


def install(out: str) -> None:
    """Begin, in this process, its threads, and the processes that it forks."""
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    moved = 900 + handle % 100  # programs close or reuse low descriptors
    os.dup2(handle, moved)
    os.close(handle)
    noted: set[str] = set()
    last = ""

    def note(key: str) -> None:
        nonlocal last
        if compiling():
            return  # torch.compile would trace this function and break its graph here
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
        if test != last:
            last = test
            noted.clear()
        if test and key not in noted:
            noted.add(key)
            os.write(moved, f"{key}\t{test}\n".encode())

    setattr(builtins, NOTE, note)
    plain_get_code, plain_exec = SourceFileLoader.get_code, SourceFileLoader.exec_module

    def noting(tree: Any, filename: str, mode: str = "exec") -> Any:
        if name_of(filename):
            instrument(tree, name_of(filename), NOTE)
        return compile(tree, filename, mode, dont_inherit=True)

    def get_code(self: SourceFileLoader, fullname: str) -> Any:
        if not name_of(self.path):
            return plain_get_code(self, fullname)
        return noting(ast.parse(Path(self.path).read_bytes(), self.path), self.path)

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        global compiling
        plain_exec(self, module)
        if module.__name__ == "torch.compiler":
            compiling = module.is_compiling
        if module.__name__ == "triton.runtime.interpreter":
            vars(module)["compile"] = noting

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    SourceFileLoader.exec_module = exec_module  # type: ignore[assignment, method-assign]


if os.environ.get("LAMINA_ENTERED"):
    install(os.environ["LAMINA_ENTERED"])
