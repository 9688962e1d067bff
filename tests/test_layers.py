"""What keeps the layers apart, read from the syntax trees: what import-linter cannot see.

`complaints` is the checker; the first tests run it over the packages, the rest show on planted
sources that each rule fails when it is broken.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_trees import (
    LAYERS,
    MAX_LINES,
    ROOT,
    dotted,
    lamina_imports,
    names_of,
    nodes_of,
    public_face,
    source_of,
    sub_faces,
    tree_of,
)

COLLECTIVES = frozenset(
    """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier batch_isend_irecv
    broadcast broadcast_object_list gather gather_object irecv isend monitored_barrier P2POp
    recv recv_object_list reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor
    scatter scatter_object_list send send_object_list _coalescing_manager
    """.split()
)
# Every public name of these modules communicates.
COLLECTIVE_MODULES = (
    "torch.distributed._functional_collectives",
    "torch.distributed.nn",
    "torch.distributed._symmetric_memory",
    "torch.ops._c10d_functional",
    "torch.ops._c10d_functional_autograd",
    "torch.ops.c10d",
    "torch.ops.symm_mem",
)
# Methods of a ProcessGroup whose names nothing else in PyTorch has.
GROUP_METHODS = frozenset(
    """
    allreduce allreduce_coalesced allgather allgather_coalesced
    allgather_into_tensor_coalesced _allgather_base _reduce_scatter_base
    reduce_scatter_tensor_coalesced alltoall alltoall_base
    """.split()
)
GROUP_MAKERS = frozenset(
    """
    init_process_group new_group new_subgroups new_subgroups_by_enumeration split_group
    shrink_group destroy_process_group init_device_mesh
    """.split()
)
# Where torch shows the functions of its distributed package.
DISTRIBUTED = ("torch.distributed", "torch.distributed.distributed_c10d")
MESHES = ("torch.distributed", "torch.distributed.device_mesh", "torch.distributed.tensor")


@functools.cache
def references(tree: ast.Module) -> list[tuple[int, str, bool]]:
    """Return (line, full path, whether called) of all that the module imports and touches."""
    bound = names_of(tree)
    called = {id(node.func) for node in nodes_of(tree) if isinstance(node, ast.Call)}
    touched: list[tuple[int, str, bool]] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            path = dotted(node, bound)
            if path is not None:
                touched.append((node.lineno, path, id(node) in called))
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            touched += [(node.lineno, name, False) for name in names]
    return touched


def reads_environment(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, path, _ in references(tree):
        if re.fullmatch(r"os\.(environb?|getenvb?|putenv|unsetenv)", path):
            yield line, f"{path}: only mesh reads environment variables"


def makes_groups(tree: ast.Module) -> Iterator[tuple[int, str]]:
    remedy = "only mesh makes process groups; take a MeshAxis from it"
    for line, path, called in references(tree):
        front, _, name = path.rpartition(".")
        makes_mesh = path.endswith("DeviceMesh.from_group") or (name == "DeviceMesh" and called)
        backend = (
            called and re.fullmatch(r"(_?ProcessGroup\w*|\w*Store)", name) and "distributed" in path
        )
        if (front in (*DISTRIBUTED, *MESHES) and name in GROUP_MAKERS) or makes_mesh or backend:
            yield line, f"{path}: {remedy}"
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("_flatten", "_unflatten"):
            yield node.lineno, f".{node.attr}: makes a mesh, and {remedy}"


def is_method_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)


def communicates(tree: ast.Module) -> Iterator[tuple[int, str]]:
    remedy = "only collectives communicates; call lamina.collectives"
    for line, path, _ in references(tree):
        front, _, name = path.rpartition(".")
        inside = any(path.startswith(f"{module}.") for module in COLLECTIVE_MODULES)
        if (front in DISTRIBUTED and name in COLLECTIVES) or inside:
            yield line, f"{path}: {remedy}"
    for node in nodes_of(tree):
        method = node.func.attr if is_method_call(node) else None
        if method in GROUP_METHODS:
            yield node.lineno, f".{method}(): {remedy}"


def imports_wrongly(
    tree: ast.Module, layer: str, faces: dict[str, frozenset[str]]
) -> Iterator[tuple[int, str]]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 1:
            yield node.lineno, "relative import from above: write the full module path"
    for line, module, name in lamina_imports(tree):
        parts = module.split(".")
        if parts[0] != "lamina" or len(parts) < 2 or parts[1] == layer:
            continue
        other = parts[1]
        if other not in LAYERS or LAYERS.index(other) > LAYERS.index(layer):
            yield line, f"{module}: {layer} may import only {LAYERS[: LAYERS.index(layer)]}"
        elif module not in faces:
            yield line, f"{module}: import from a face, lamina.{other} or lamina.{other}.engine"
        elif name is not None and name not in faces[module] and f"{module}.{name}" not in faces:
            yield line, f"{name} is not in {module}.__all__"


def complaints(source: str, layer: str, faces: dict[str, frozenset[str]]) -> list[str]:
    """Everything in one module of `layer` that crosses the lines of CONTRIBUTING.md, "A layer"."""
    tree = tree_of(source)
    found = list(imports_wrongly(tree, layer, faces))
    if layer != "mesh":
        found += [*reads_environment(tree), *makes_groups(tree)]
    if layer != "collectives":
        found += communicates(tree)
    if (length := len(source.splitlines())) > MAX_LINES:
        found.append(
            (length, f"{length} lines: a file has {MAX_LINES} at most; split it by concept")
        )
    return [f"line {line}: {text}" for line, text in sorted(set(found))]


@pytest.fixture(scope="module")
def faces() -> dict[str, frozenset[str]]:
    """The names of each face, by the module that a caller imports them from."""
    found = {}
    for layer in LAYERS:
        rooms = {"": "__init__.py", ".engine": "engine.py"}
        rooms |= {f".{sub}": room for sub, room in sub_faces(layer).items()}
        for face, room in rooms.items():
            found[f"lamina.{layer}{face}"] = public_face((source_of(layer) / room).read_text())
    return found


# ------------------------------------------------------------------------ the packages comply


@pytest.mark.parametrize("layer", LAYERS)
def test_every_module_of_a_layer_stays_within_its_room(layer, faces):
    found = [
        f"{path.relative_to(ROOT)} {text}"
        for path in sorted(source_of(layer).rglob("*.py"))
        for text in complaints(path.read_text(), layer, faces)
    ]
    assert not found, "\n" + "\n".join(found)


def test_lamina_is_a_namespace_that_no_package_owns():
    assert not list(ROOT.glob("packages/*/src/lamina/__init__.py"))
    assert {path.name for path in (ROOT / "packages").iterdir() if path.is_dir()} == set(LAYERS)
    for layer in LAYERS:
        assert [path.name for path in source_of(layer).parent.iterdir() if path.is_dir()] == [layer]
        assert (source_of(layer) / "py.typed").exists()


def test_every_public_name_of_a_layer_exists_and_hides_no_module():
    """The API reference shows a module in the place of a function that has its name."""
    program = "import importlib, pkgutil, sys\nfor layer in sys.argv[1:]:\n"
    program += "    face = importlib.import_module('lamina.' + layer)\n"
    program += "    hidden = {module.name for module in pkgutil.iter_modules(face.__path__)}\n"
    program += "    wrong = [n for n in face.__all__ if n in hidden or not hasattr(face, n)]\n"
    program += "    print(*(f'{layer}.{name}' for name in wrong))\n"
    run = subprocess.run([sys.executable, "-c", program, *LAYERS], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert not run.stdout.split()


# ------------------------------------------------------------------------ the checker can see

PLANTED = {
    "environment by attribute": ("fsdp", "import os\nx = os.environ['RANK']"),
    "environment by name": ("buffers", "from os import environ as e\nx = e.get('RANK')"),
    "environment by getenv": ("models", "import os\nx = os.getenv('RANK')"),
    "group made": ("ddp", "import torch.distributed as dist\ng = dist.new_group([0])"),
    "group made under another name": ("ddp", "from torch.distributed import new_group as ng"),
    "world started": ("fsdp", "import torch\ntorch.distributed.init_process_group('gloo')"),
    "mesh made": ("fsdp", "from torch.distributed.device_mesh import init_device_mesh"),
    "mesh constructed": ("fsdp", "import torch.distributed as d\nd.DeviceMesh('cpu', [0])"),
    "mesh flattened": ("fsdp", "def f(mesh):\n    return mesh['a', 'b']._flatten()"),
    "collective": ("ddp", "import torch.distributed as dist\ndist.all_reduce(x)"),
    "collective handed on": ("ddp", "from torch import distributed as d\nf = d.all_gather_single"),
    "collective within": ("mesh", "def f():\n  import torch.distributed as d\n  d.barrier()"),
    "collective below": ("buffers", "from torch.distributed import broadcast"),
    "functional collective": (
        "models",
        "import torch.distributed._functional_collectives as fc\nfc.all_reduce(x, 'sum', g)",
    ),
    "collective by operator": ("fsdp", "import torch\ntorch.ops._c10d_functional.broadcast"),
    "collective by method": ("fsdp", "def f(group, x):\n    group.allreduce([x])"),
    "upward import": ("buffers", "from lamina.collectives import Ledger"),
    "upward import in a function": ("mesh", "def f():\n    import lamina.fsdp"),
    "upward import for types": (
        "mesh",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lamina import buffers",
    ),
    "upward import by string": ("mesh", "import importlib\nimportlib.import_module('lamina.fsdp')"),
    "submodule of a lower layer": ("fsdp", "from lamina.mesh.layout import ParallelLayout"),
    "module of a lower layer by name": ("fsdp", "from lamina.mesh import layout"),
    "private name of a lower layer": ("fsdp", "from lamina.mesh import _secret"),
    "relative import": ("fsdp", "from ..mesh import ParallelLayout"),
    "too long": ("fsdp", "x = 1\n" * (MAX_LINES + 1)),
}  # fmt: skip

ALLOWED = {
    "mesh reads the environment": ("mesh", "import os\nx = os.environ['RANK']"),
    "mesh makes groups": ("mesh", "import torch.distributed as dist\ng = dist.new_group([0])"),
    "collectives communicates": ("collectives", "import torch.distributed as d\nd.all_reduce(x)"),
    "an engine name below": ("fsdp", "from lamina.mesh.engine import ParallelLayout"),
    "a public name below": ("fsdp", "from lamina.mesh import ParallelLayout"),
    "its own module": ("fsdp", "from lamina.fsdp.units.plan import find_units\nfrom .a import b"),
    "the type of a mesh": (
        "fsdp",
        "from torch.distributed.device_mesh import DeviceMesh\nisinstance(m, DeviceMesh)",
    ),
    "asking for the rank": ("ddp", "import torch.distributed as d\nr = d.get_rank()"),
    "another all_reduce": ("ddp", "from lamina.collectives import all_reduce\nall_reduce(x)"),
    "torch's checkpoints": ("checkpoint", "import torch.distributed.checkpoint as d\nd.save({})"),
    "as long as may be": ("fsdp", "x = 1\n" * MAX_LINES),
}  # fmt: skip
FACES = {
    f"lamina.{layer}{face}": frozenset({"ParallelLayout", "all_reduce", "Ledger"})
    for layer in LAYERS
    for face in ("", ".engine")
}


@pytest.mark.parametrize("name", PLANTED)
def test_checker_sees_a_planted(name):
    layer, source = PLANTED[name]
    assert complaints(source, layer, FACES)


@pytest.mark.parametrize("name", ALLOWED)
def test_checker_allows(name):
    layer, source = ALLOWED[name]
    assert not complaints(source, layer, FACES)


def lint_imports(where: Path) -> subprocess.CompletedProcess[str]:
    """Run this repository's import contracts over a made-up package of the same layers."""
    text = (ROOT / "pyproject.toml").read_text()
    contracts = text[text.index("[tool.importlinter]") :].replace('"lamina"', '"planted"')
    (where / "pyproject.toml").write_text(contracts)
    program = "import sys; sys.path.insert(0, ''); from importlinter import cli; "
    program += "cli.lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"],
        cwd=where,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    for layer in LAYERS:
        (tmp_path / "planted" / layer).mkdir(parents=True)
        (tmp_path / "planted" / layer / "__init__.py").touch()
    return tmp_path


def test_import_contract_is_kept_by_clean_layers(planted):
    (planted / "planted/fsdp/units.py").write_text("from planted.mesh import x")
    run = lint_imports(planted)
    assert run.returncode == 0, run.stdout


def test_import_contract_breaks_on_an_upward_import(planted):
    (planted / "planted/mesh/late.py").write_text("def f():\n    from planted.fsdp import x")
    run = lint_imports(planted)
    assert run.returncode == 1, run.stdout
    assert "planted.mesh.late -> planted.fsdp" in run.stdout


def test_import_contract_breaks_on_a_layer_it_does_not_know(planted):
    (planted / "planted/utils").mkdir()
    (planted / "planted/utils/__init__.py").touch()
    assert lint_imports(planted).returncode == 1
