"""Imports test modules as pytest does: by file, under pytest's name, with asserts rewritten.

The compiled code is kept by path, time and size of the file. The fork server compiles a module
before it forks, so that its ranks only execute it; an edited file is compiled again.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

from _pytest.assertion.rewrite import rewrite_asserts


@dataclass
class ModuleLoader:
    """Compiles test modules once per version of their file, and executes them on request."""

    _compiled: dict[str, tuple[tuple[int, int], types.CodeType]] = field(default_factory=dict)

    def compile(self, path: str) -> types.CodeType:
        """Return the module's code with asserts rewritten.

        Raises OSError or SyntaxError as an import would.
        """
        stat = os.stat(path)
        version = (stat.st_mtime_ns, stat.st_size)
        known = self._compiled.get(path)
        if known is not None and known[0] == version:
            return known[1]
        source = Path(path).read_bytes()
        tree = ast.parse(source, filename=path)
        rewrite_asserts(tree, source, path)
        code = compile(tree, path, "exec", dont_inherit=True)
        self._compiled[path] = (version, code)
        return code

    def load(self, name: str, path: str) -> types.ModuleType:
        """Execute the module of file `path` under `name` and enter it in `sys.modules`."""
        code = self.compile(path)
        _enter_parents(name, Path(path))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None:
            raise ImportError(f"{path} is not a Python source file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        exec(code, module.__dict__)
        return module


def _enter_parents(name: str, path: Path) -> None:
    # Pickle imports `a.b.test_x` through `a`, and a test module may import its neighbours
    # relatively; under importmode importlib neither `a` nor `a.b` need be importable by themselves.
    directory = path.parent
    while "." in name:
        name = name.rpartition(".")[0]
        if name not in sys.modules:
            initializer = directory / "__init__.py"
            parent = types.ModuleType(name)
            parent.__path__ = [str(directory)]
            parent.__package__ = name
            sys.modules[name] = parent
            if initializer.exists():
                parent.__file__ = str(initializer)
                exec(compile(initializer.read_bytes(), str(initializer), "exec"), parent.__dict__)
        directory = directory.parent
