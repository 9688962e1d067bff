"""Transformer Engine as its sources describe it, for machines that cannot import it.

The meta wheel (1.2 MB, no binaries) holds all Python sources. Signatures are read from them, and a
stand-in is made whose every call must bind to the real one's.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tempfile
import types
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

VERSION = "2.20.2"
CACHE = Path(tempfile.gettempdir()) / f"lamina-transformer-engine-{VERSION}"
RECIPES = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling",
           "NVFP4BlockScaling")  # fmt: skip


def sources() -> zipfile.ZipFile:
    """The meta wheel, from the cache or the package index; skips where there is neither."""
    found = list(CACHE.glob("transformer_engine-*.whl"))
    if not found:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest",
                   str(CACHE), f"transformer-engine=={VERSION}"]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        except (subprocess.SubprocessError, OSError) as error:
            reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            pytest.skip(f"transformer-engine {VERSION} cannot be downloaded: {reason}")
        found = list(CACHE.glob("transformer_engine-*.whl"))
    return zipfile.ZipFile(found[0])


def definition(wheel: zipfile.ZipFile, file: str, *names: str) -> ast.AST:
    """A function or class by its place in a file."""
    node: ast.AST = ast.parse(wheel.read(f"transformer_engine/{file}"))
    for name in names:
        node = next(child for child in node.body if getattr(child, "name", None) == name)
    return node


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """What a call must bind to; defaults are only known to exist."""
    given, kinds = function.args, inspect.Parameter
    plain = [*given.posonlyargs, *given.args]
    defaults = [kinds.empty] * (len(plain) - len(given.defaults)) + [...] * len(given.defaults)
    parameters = [
        kinds(arg.arg, kinds.POSITIONAL_OR_KEYWORD, default=default)
        for arg, default in zip(plain, defaults, strict=True)
        if arg.arg != "self"
    ]
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        missing = kinds.empty if default is None else ...
        parameters.append(kinds(arg.arg, kinds.KEYWORD_ONLY, default=missing))
    return inspect.Signature(parameters)


def fields(recipe: ast.ClassDef) -> inspect.Signature:
    """What a dataclass is made with."""
    return inspect.Signature([
        inspect.Parameter(
            node.target.id,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if node.value is None else ...,
        )
        for node in recipe.body
        if isinstance(node, ast.AnnAssign)
    ])  # fmt: skip


class Calls(list):
    """(name, bound arguments) of every call, in order."""

    def named(self, name: str) -> list[dict]:
        return [arguments for called, arguments in self if called == name]


def stand_in() -> tuple[dict[str, types.ModuleType], Calls]:
    """Modules that take the place of Transformer Engine's, and the calls that they saw."""
    wheel, calls = sources(), Calls()
    exported = ast.parse(wheel.read("transformer_engine/pytorch/__init__.py"))
    public = {a.asname or a.name for n in ast.walk(exported) if isinstance(n, ast.ImportFrom)
              for a in n.names}  # fmt: skip
    assert {"Linear", "autocast", "quantized_model_init"} <= public
    te, recipes = types.ModuleType("te"), types.ModuleType("recipes")
    made = definition(wheel, "pytorch/module/linear.py", "Linear", "__init__")
    te.Linear = linear(signature(made), calls)
    for name, path in (("autocast", ("autocast", "__init__")),
                       ("quantized_model_init", ("quantized_model_init",))):  # fmt: skip
        function = definition(wheel, "pytorch/quantization.py", *path)
        setattr(te, name, context(name, signature(function), calls))
    for name in RECIPES:
        bound = fields(definition(wheel, "common/recipe/__init__.py", name))
        setattr(recipes, name, recorder(name, bound, calls))
    members = definition(wheel, "common/recipe/__init__.py", "Format").body
    names = {n.targets[0].id: n.targets[0].id for n in members if isinstance(n, ast.Assign)}
    recipes.Format = types.SimpleNamespace(**names)
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


def linear(bound: inspect.Signature, calls: Calls) -> type[nn.Module]:
    class Linear(nn.Module):
        """As the real one: divides sizes, initialises by ``init_method``, remakes parameters."""

        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bound.bind(*args, **kwargs).arguments
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

        def reset_parameters(self, defer_init=False):
            if defer_init:
                return
            with torch.no_grad():
                self.initialise(self.weight)
                self.weight = nn.Parameter(self.weight.detach())
                if self.bias is not None:
                    self.bias = nn.Parameter(torch.zeros_like(self.bias))

        def forward(self, inp, is_first_microbatch=None, fp8_output=False, fp8_grad=False):
            calls.append(("forward", {"weight": tuple(self.weight.shape)}))
            return F.linear(inp, self.weight, self.bias)

    return Linear
