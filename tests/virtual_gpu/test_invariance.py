"""`invariant=True` on a GPU: operators whose bits depend on no shape, and one set of bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MODELS_TESTS = Path(__file__).parents[2] / "packages" / "models" / "tests"
PROGRAM = """
import json, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode
import invariant_layouts as layouts
from lamina.models import GPTModel

seen = set()

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        numbers = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if any(x.is_cuda for x in numbers):
            seen.add(function._schema.name.removeprefix("aten::"))
        return function(*arguments, **(named or {}))

model = GPTModel(layouts.MODELS[sys.argv[1]], seed=1).cuda()
tokens, labels = (x[:1].cuda() for x in layouts.batch(0))
with Operators():
    model(tokens, labels, reduction="sum").backward()
    with torch.no_grad():
        model(tokens)
print(json.dumps(sorted(seen)))
"""
# What moves elements or computes each by itself, in alphabetical order.
BY_ELEMENT = """
    _to_copy _unsafe_view add add_ alias cat clone copy_ cos detach div div_ embedding empty_like
    erf exp exp_ expand fill_ gather index log masked_fill_ mul mul_ neg new_empty new_ones
    new_zeros ones_like permute pow reciprocal select sin slice split split_with_sizes sqrt sub sub_
    t tanh tanh_backward transpose unsqueeze view where zeros_like
    """
# What is exact in any order: the largest, and sums of at most two numbers or of one and zeros.
EXACT = "amax index_add_ scatter_add_"


@pytest.mark.parametrize("name", ["grouped", "gpt2", "whole", "gated", "latent"])
def test_no_operator_of_a_step_has_an_order_of_summation(name):
    """torch's reductions and products choose their order on a GPU by the shapes of their operands.

    On a virtual GPU the CPU's kernels compute, so bits alone would not show one.
    """
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, name],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "VGPU_COMPUTE": "at-once", "PYTHONPATH": str(MODELS_TESTS)},
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    assert set(json.loads(answer.stdout)) <= {*BY_ELEMENT.split(), *EXACT.split()}


def test_ranks_that_share_a_gpu_have_the_bits_of_one():
    words = "--models grouped --steps 1 --rows 2 --worlds 1 2 --dtypes float32 --layouts"
    layouts = ["dp2", "tp2,sp", "cp2"]
    answer = subprocess.run(
        [sys.executable, "invariant_on_gpu.py", *words.split(), *layouts],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=MODELS_TESTS,
        env={**os.environ, "VGPU_COMPUTE": "at-once", "VGPU_SHARE": "1"},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    assert "4 of 4 have the bits of one rank alone" in answer.stdout
