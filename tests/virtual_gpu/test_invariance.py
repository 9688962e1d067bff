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
from lamina.models.moe.router import TopKRouter

TopKRouter._record = lambda *_: None  # statistics, which no gradient sees
seen = set()

class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        numbers = [x for x in arguments if isinstance(x, torch.Tensor) and x.is_floating_point()]
        if any(x.is_cuda for x in numbers):
            seen.add(function._schema.name.removeprefix("aten::"))
        return function(*arguments, **(named or {}))

model = GPTModel({**layouts.MODELS, **layouts.KINDS}[sys.argv[1]], seed=1).cuda()
tokens, labels = (x[:1].cuda() for x in layouts.batch(0))
with Operators():
    model(tokens, labels, reduction="sum").backward()
    with torch.no_grad():
        model(tokens)
print(json.dumps(sorted(seen)))
"""
# What moves elements or computes each by itself, in alphabetical order.
BY_ELEMENT = """
    _to_copy _unsafe_view abs add add_ alias cat clamp clone constant_pad_nd copy_ cos detach
    div div_ embedding empty_like eq erf exp exp_ expand fill_ gather ge index index_select log
    masked_fill masked_fill_ mul mul_ neg new_empty new_ones new_zeros ones_like permute pow
    reciprocal select select_backward sin slice slice_backward split split_with_sizes sqrt
    squeeze stack sub sub_ t tanh tanh_backward topk transpose unbind unsqueeze view where
    zeros_like
    """
# What is exact in any order: the largest, and sums of at most two numbers or of one and zeros.
EXACT = "amax index_add_ scatter_add scatter_add_"


@pytest.mark.parametrize(
    "name", ["grouped", "gpt2", "whole", "gated", "latent", "sigmoid experts", "hybrid"]
)
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


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("grouped", "dp2 tp2,sp cp2"), ("hybrid", "dp2 dp2,expert_tp2 tp2,sp,ep2")],
)
def test_ranks_that_share_a_gpu_have_the_bits_of_one(name, layouts):
    words = f"--models {name} --steps 1 --rows 2 --worlds 1 2 --dtypes float32 --layouts {layouts}"
    answer = subprocess.run(
        [sys.executable, "invariant_on_gpu.py", *words.split()],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=MODELS_TESTS,
        env={**os.environ, "VGPU_COMPUTE": "at-once", "VGPU_SHARE": "1"},
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]
    assert "4 of 4 have the bits of one rank alone" in answer.stdout
