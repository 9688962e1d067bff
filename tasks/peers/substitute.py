"""Rewrites a file of torch's tests: GPUs become CPUs and, if asked, torch's names become Lamina's.

What is written goes into a directory of the run and nowhere else: nothing of torch's tests is kept.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

Names = Mapping[tuple[str, str], str]  # (module, name) -> module that has the name instead

FSDP = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
TENSOR = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._tensor.api")
COMMON = "torch.testing._internal"
# In both runs: what a machine without GPUs lacks.
DEVICE: dict[tuple[str, str], str] = {
    (f"{COMMON}.common_cuda", "TEST_CUDA"): "peer_device",
    (f"{COMMON}.common_distributed", "skip_if_lt_x_gpu"): "peer_device",
    (f"{COMMON}.common_distributed", "skip_if_no_gpu"): "peer_device",
    (f"{COMMON}.common_distributed", "requires_nccl"): "peer_device",
    (f"{COMMON}.common_distributed", "nccl_skip_if_lt_x_gpu"): "peer_device",
    (f"{COMMON}.common_distributed", "init_multigpu_helper"): "peer_device",
    (f"{COMMON}.common_fsdp", "FSDPTest"): "peer_device",
    (f"{COMMON}.distributed._tensor.common_dtensor", "skip_if_lt_x_gpu"): "peer_device",
    (f"{COMMON}.common_fsdp", "test_compiled_fsdp"): "peer_device",
    (f"{COMMON}.inductor_utils", "HAS_CUDA"): "peer_device",
    (f"{COMMON}.common_fsdp", "FSDPTestMultiThread"): "peer_device",
    ("torch.distributed.fsdp", "FullyShardedDataParallel"): "peer_device",
    ("torch.nn.parallel", "DistributedDataParallel"): "peer_device",
    ("torch.distributed._composable", "replicate"): "peer_device",
    ("torch.distributed._composable.replicate", "replicate"): "peer_device",
}
# In the run over Lamina: its names for torch's.
LAMINA: dict[tuple[str, str], str] = {
    **{
        (module, name): "peer_lamina"
        for module in FSDP
        for name in ("fully_shard", "FSDPModule", "UnshardHandle", "register_fsdp_forward_method")
    },
    **{(module, "DTensor"): "peer_lamina" for module in TENSOR},
    (f"{COMMON}.common_fsdp", "check_sharded_parity"): "peer_lamina",
    (f"{COMMON}.distributed.common_state_dict", "VerifyStateDictMixin"): "peer_lamina",
    ("torch.nn.parallel", "DistributedDataParallel"): "peer_lamina",
}
WRAPS = ("fully_shard", "DistributedDataParallel")  # what puts a model under Lamina
WORDS = {"cuda": "cpu", "nccl": "gloo", "cpu:gloo,cuda:nccl": "gloo"}
CHAINS = {"torch.cuda": "peer_device"}
WRAPPERS = ("torch.nn.parallel.DistributedDataParallel", "nn.parallel.DistributedDataParallel")


class Rewriter(ast.NodeTransformer):
    """Replaces imports, `torch.cuda.*`, `.cuda()`, and the words "cuda" and "nccl"."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def visit_ImportFrom(self, node: ast.ImportFrom) -> list[ast.stmt]:
        """Split an import by where its names come from now."""
        places: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            place = self.names.get((node.module or "", alias.name), node.module or "")
            places.setdefault(place, []).append(alias)
        return [ast.ImportFrom(place, aliases, node.level) for place, aliases in places.items()]

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        """Replace names of devices and backends."""
        if isinstance(node.value, str):
            text = node.value
            whole = WORDS.get(text) or ("cpu" if text.startswith("cuda:") else text)
            return ast.Constant(whole)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        """Leave the table of what backends can do: its keys are words like "cuda" too."""
        if not ast.unparse(node.value).startswith("DistTestCases."):
            self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Replace `torch.cuda`, and wrappers named by their whole path."""
        path = ast.unparse(node)
        if path in CHAINS:
            return ast.Name(CHAINS[path])
        if path in WRAPPERS:
            place = self.names[("torch.nn.parallel", "DistributedDataParallel")]
            return ast.Attribute(ast.Name(place), "DistributedDataParallel")
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Replace `x.cuda(...)` by `x.cpu()`, and devices with an index by the CPU."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return ast.Call(ast.Attribute(node.func.value, "cpu"), [], [])
        if ast.unparse(node.func) == "torch.device":
            node.args = node.args[:1]  # no index: all ranks share one CPU
            return node
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            node.args[:1] = [without_index(place) for place in node.args[:1]]
        for keyword in node.keywords:
            if keyword.arg == "device":
                keyword.value = without_index(keyword.value)
        return node


def without_index(place: ast.expr) -> ast.expr:
    """Return an expression for a device that is the CPU where the test has a GPU's number."""
    if isinstance(place, ast.Name | ast.Attribute | ast.Subscript):
        return ast.Call(ast.Attribute(ast.Name("peer_device"), "without_index"), [place], [])
    return ast.Constant("cpu") if isinstance(place, ast.Constant) and place.value == 0 else place


def substitute(text: str, *, lamina: bool) -> str:
    """Return the test file for this machine, over torch itself or over Lamina."""
    tree = Rewriter({**DEVICE, **LAMINA} if lamina else DEVICE).visit(ast.parse(text))
    first = next(
        (
            place
            for place, node in enumerate(tree.body)
            if not (isinstance(node, ast.Expr) or getattr(node, "module", "") == "__future__")
        ),
        0,
    )
    modules = ("peer_device", "peer_lamina") if lamina else ("peer_device",)
    tree.body[first:first] = [ast.Import([ast.alias(name)]) for name in modules]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def internal_tests(text: str) -> set[str]:
    """Return "Class::test" of those that use names of torch's private FSDP modules.

    What they check is how torch is built, which another implementation cannot share.
    """
    tree = ast.parse(text)
    private = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "_fully_shard" in (node.module or "")
        for alias in node.names
    } - {name for _, name in LAMINA}
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            for test in node.body:
                used = {n.id for n in ast.walk(test) if isinstance(n, ast.Name)}
                if isinstance(test, ast.FunctionDef) and used & private:
                    found.add(f"{node.name}::{test.name}")
    return found


def wraps(text: str) -> bool:
    """Whether a file of tests takes from torch what puts a model under Lamina in the other run."""
    return any(path in text for path in WRAPPERS) or any(
        alias.name in WRAPS and (node.module or "", alias.name) in LAMINA
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )
