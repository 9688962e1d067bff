"""Transformer Engine as its sources describe it, for machines that cannot import it.

A stand-in is made whose every call must bind to the real one's signature. Signatures are read from
the installed package's sources where it is installed (importing it needs a GPU's libraries, reading
does not), else from ``transformer_engine_signatures.json`` beside this file: what the meta wheel
(1.2 MB, no binaries) of `VERSION` says, written by

    python packages/models/tests/transformer_engine_sources.py
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VERSION = "2.20.2"
CACHE = Path(tempfile.gettempdir()) / f"lamina-transformer-engine-{VERSION}"
KEPT = Path(__file__).with_name("transformer_engine_signatures.json")
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
           "NVFP4BlockScaling")  # fmt: skip
FUNCTIONS = {
    "Linear": ("pytorch/module/linear.py", "Linear", "__init__"),
    "Linear.reset_parameters": ("pytorch/module/linear.py", "Linear", "reset_parameters"),
    "Linear.forward": ("pytorch/module/linear.py", "Linear", "forward"),
    "autocast": ("pytorch/quantization.py", "autocast", "__init__"),
    "quantized_model_init": ("pytorch/quantization.py", "quantized_model_init"),
}
Reader = Callable[[str], str]
"""From a path below ``transformer_engine/`` to the file's text."""


def wheel() -> Reader:
    """The meta wheel, from the cache or the package index.

    Raises:
        OSError: where there is neither.

    """
    found = list(CACHE.glob("transformer_engine-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest",
                   str(CACHE), f"transformer-engine=={VERSION}"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except subprocess.SubprocessError as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise OSError(f"transformer-engine {VERSION} cannot be downloaded: {reason}") from error
        found = list(CACHE.glob("transformer_engine-*.whl"))
    archive = zipfile.ZipFile(found[0])
    return lambda file: archive.read(f"transformer_engine/{file}").decode()


def installed() -> Reader | None:
    """The installed package's sources, or None where there is none."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    return lambda file: (folder / file).read_text()


def signatures(read: Reader) -> dict:
    """What there is and how it is called, as plain values."""
    exported = ast.parse(read("pytorch/__init__.py"))
    public = {a.asname or a.name for n in ast.walk(exported) if isinstance(n, ast.ImportFrom)
              for a in n.names}  # fmt: skip
    recipes = "common/recipe/__init__.py"
    formats = definition(read, recipes, "Format").body
    return {
        "public": sorted(public & set(FUNCTIONS)),
        "calls": {name: parameters(definition(read, *path)) for name, path in FUNCTIONS.items()}
        | {name: fields(definition(read, recipes, name)) for name in RECIPES},
        "formats": [n.targets[0].id for n in formats if isinstance(n, ast.Assign)],
    }


def known() -> dict:
    """Signatures of the installed package, or those kept here."""
    read = installed()
    return json.loads(KEPT.read_text()) if read is None else signatures(read)


def definition(read: Reader, file: str, *names: str) -> ast.AST:
    """A function or class by its place in a file."""
    node: ast.AST = ast.parse(read(file))
    for name in names:
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    return node


def parameters(function: ast.FunctionDef) -> list[list]:
    """Name, kind, and whether there is a default, of all that a call may give."""
    given, found = function.args, []
    plain = [*given.posonlyargs, *given.args]
    required = len(plain) - len(given.defaults)
    for place, arg in enumerate(plain):
        if arg.arg != "self":
            found.append([arg.arg, "POSITIONAL_OR_KEYWORD", place >= required])
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found.append([arg.arg, "KEYWORD_ONLY", default is not None])
    return found


def fields(recipe: ast.ClassDef) -> list[list]:
    """What a dataclass is made with."""
    return [
        [node.target.id, "KEYWORD_ONLY", node.value is not None]
        for node in recipe.body
        if isinstance(node, ast.AnnAssign)
    ]


def signature(found: list[list]) -> inspect.Signature:
    """What a call must bind to; defaults are only known to exist."""
    kinds = inspect.Parameter
    return inspect.Signature([
        kinds(name, getattr(kinds, kind), default=... if default else kinds.empty)
        for name, kind, default in found
    ])  # fmt: skip


class Calls(list):
    """(name, bound arguments) of every call, in order."""

    def named(self, name: str) -> list[dict]:
        return [arguments for called, arguments in self if called == name]


def stand_in() -> tuple[dict[str, types.ModuleType], Calls]:
    """Modules that take the place of Transformer Engine's, and the calls that they saw."""
    found, calls = known(), Calls()
    assert {"Linear", "autocast", "quantized_model_init"} <= set(found["public"])
    bound = {name: signature(given) for name, given in found["calls"].items()}
    te, recipes = types.ModuleType("te"), types.ModuleType("recipes")
    te.Linear = linear(bound, calls)
    for name in ("autocast", "quantized_model_init"):
        setattr(te, name, context(name, bound[name], calls))
    for name in RECIPES:
        setattr(recipes, name, recorder(name, bound[name], calls))
    recipes.Format = types.SimpleNamespace(**{name: name for name in found["formats"]})
    modules = {
        "transformer_engine": types.ModuleType("transformer_engine"),
        "transformer_engine.pytorch": te,
        "transformer_engine.common": types.ModuleType("common"),
        "transformer_engine.common.recipe": recipes,
    }
    return modules, calls


def recorder(name: str, bound: inspect.Signature, calls: Calls):
    def call(*args, **kwargs):
        arguments = bound.bind(*args, **kwargs).arguments
        calls.append((name, arguments))
        return (name, tuple(arguments))

    return call


def context(name: str, bound: inspect.Signature, calls: Calls):
    class Context:
        depth = 0

        def __init__(self, *args, **kwargs):
            calls.append((name, bound.bind(*args, **kwargs).arguments))

        def __enter__(self):
            Context.depth += 1

        def __exit__(self, *_):
            Context.depth -= 1

    return Context


def linear(bound: dict[str, inspect.Signature], calls: Calls) -> type[nn.Module]:
    class Linear(nn.Module):
        """As the real one: divides sizes, initialises by ``init_method``, remakes parameters."""

        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bound["Linear"].bind(*args, **kwargs).arguments
            calls.append(("Linear", given))
            rows, columns = given["out_features"], given["in_features"]
            if given["parallel_mode"] == "column":
                rows //= given["tp_size"]
            elif given["parallel_mode"] == "row":
                columns //= given["tp_size"]
            options = {"device": given["device"], "dtype": given["params_dtype"]}
            self.weight = nn.Parameter(torch.empty(rows, columns, **options))
            self.bias = None
            if given["bias"]:
                self.bias = nn.Parameter(torch.empty(rows, **options))
            self.initialise = given["init_method"]
            self.reset_parameters(defer_init=given["device"] == "meta")

        def reset_parameters(self, *args, **kwargs):
            given = bound["Linear.reset_parameters"].bind(*args, **kwargs).arguments
            if given.get("defer_init", False):
                return
            with torch.no_grad():
                self.initialise(self.weight)
                self.weight = nn.Parameter(self.weight.detach())
                if self.bias is not None:
                    self.bias = nn.Parameter(torch.zeros_like(self.bias))

        def forward(self, *args, **kwargs):
            (inp,) = bound["Linear.forward"].bind(*args, **kwargs).arguments.values()
            calls.append(("forward", {"weight": tuple(self.weight.shape)}))
            return F.linear(inp, self.weight, self.bias)

    return Linear


if __name__ == "__main__":
    KEPT.write_text(json.dumps(signatures(wheel()), indent=1) + "\n")
