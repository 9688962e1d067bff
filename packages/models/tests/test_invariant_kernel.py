"""The kernel of `invariant=True` on GPUs: interpreted beside float64, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILED = Path(__file__).with_name("compile_chains.py")
# On a CPU tensors go to the kernel where Triton is interpreted.
PROGRAM = """
import numpy as np
import torch
from triton.runtime import interpreter
from lamina.models.invariance.chain_kernel import TILE, add_chains
from lamina.models.invariance.products import CHUNK

# The interpreter's product is a BLAS's, which for some processors sums the columns of an edge in
# another order. A GPU's is a chain of fused multiply-adds, whose products are not rounded.
def chains(builder, a, b, sums, precision, imprecise):
    total = sums.data
    for k in range(a.data.shape[1]):
        product = a.data[:, k, None].astype(np.float64) * b.data[k].astype(np.float64)
        total = (total + product).astype(np.float32)
    return interpreter.TensorHandle(total, sums.dtype.scalar)

interpreter.InterpreterBuilder.create_dot = chains

# The interpreter of Triton 3.6 makes no number of an array of one element where NumPy is 2.4.
patch = interpreter._patch_lang_tensor
def patched(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
interpreter._patch_lang_tensor = patched

def product(left, right, pieces):
    total = torch.full((*left.shape[:2], right.shape[2]), torch.nan)
    add_chains(left, right, pieces, CHUNK, total)
    return total

torch.manual_seed(0)
for batch, rows, inner, columns in [(1, 3, 5, 2), (2, TILE + 7, CHUNK + 40, TILE + 1)]:
    left = torch.randn(batch, rows, inner)
    right = torch.randn(batch, columns, inner).transpose(1, 2)  # with strides of its own
    whole = product(left, right, [slice(0, inner)])
    exact = left.double() @ right.double()
    size = left.double().abs() @ right.double().abs()
    assert ((whole - exact).abs() <= 1e-6 * size).all(), (whole - exact).abs().max()
    # Pieces of the inner dimension are added to each other, and what is between them is left out.
    half = inner // 2
    cut = product(left, right, [slice(0, half), slice(half + 1, inner)])
    rest = exact - left[..., [half]].double() @ right[:, [half]].double()
    assert ((cut - rest).abs() <= 1e-6 * size).all()
    # An element depends on its row and its column alone, wherever they are.
    for r, c in [(slice(1, rows), slice(0, columns)), (slice(0, 1), slice(1, columns))]:
        part = product(left[:, r], right[..., c], [slice(0, inner)])
        assert torch.equal(part, whole[:, r, c]), (rows, columns, r, c)
    order = torch.randperm(rows)
    assert torch.equal(product(left[:, order], right, [slice(0, inner)]), whole[:, order])
print("fine")
"""


def run(command: list[str], interpreted: str) -> str:
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": interpreted},
        timeout=240,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    return answer.stdout


def test_interpreted_elements_are_near_float64_and_depend_on_their_row_and_column_alone():
    assert "fine" in run([sys.executable, "-c", PROGRAM], "1")


def test_compiled_it_is_chains_of_multiply_adds_without_spills():
    assert run([sys.executable, str(COMPILED), "80", "90", "100"], "").count(" 0 B stack") == 6
