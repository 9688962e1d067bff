"""The kernels that a GPU may choose: against fp64 in plain PyTorch, and compiled for targets.

Interpreted where there is no GPU (conftest.py sets that), run on it where there is one.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import candidate_kernels as kernels
import operations

# Interpreted, both sides of a `where` are computed, also the one that is not taken.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def normal(*shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(*shape, generator=generator)).to(dtype).to(DEVICE)


def compare(candidate, oracle, inputs, dtype):
    """Outputs, and gradients of every input, for one random gradient of the output."""
    narrow = [x.clone().requires_grad_() for x in inputs]
    exact = [x.double().requires_grad_() for x in inputs]
    output, expected = candidate(*narrow), oracle(*exact)
    grad = normal(*output.shape, dtype=output.dtype, seed=9)
    found = torch.autograd.grad(output, narrow, grad)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for ours, exactly in zip([output, *found], [expected, *wanted], strict=True):
        assert ours.isfinite().all()
        largest = max(1.0, exactly.abs().max().item())
        assert (ours.double() - exactly).abs().max() <= ROUNDING[dtype] * largest * 4


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 64), (19, 100), (33, 257)])
def test_rms_norm(rows, width, dtype):
    def exact(x, weight):
        return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 1e-5) * weight

    inputs = normal(rows, width, dtype=dtype, scale=3.0), normal(width, dtype=dtype, seed=1)
    compare(kernels.rms_norm, exact, inputs, dtype)


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 2), (5, 3, 8), (4, 8, 128)])
def test_rope(tokens, heads, width, dtype):
    angles = normal(tokens, width // 2, scale=3.0, seed=1)
    cos, sin = angles.cos(), angles.sin()

    def exact(x):
        first, second = x.chunk(2, dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        return torch.cat((first * c - second * s, second * c + first * s), dim=-1)

    x = normal(tokens, heads, width, dtype=dtype)
    compare(lambda x: kernels.rope(x, cos, sin), exact, [x], dtype)


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 65), (2, 1500)])
def test_swiglu(rows, width, dtype):
    def exact(x):
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up

    compare(kernels.swiglu, exact, [normal(rows, 2 * width, dtype=dtype, scale=4.0)], dtype)


@pytest.mark.matrix(strength=1)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(("rows", "columns", "masked"), [(1, 1, 0), (5, 70, 3), (3, 9000, 200)])
def test_cross_entropy(rows, columns, masked, dtype):
    labels = torch.arange(rows, device=DEVICE) * 31 % (columns - masked)

    def hide(logits):  # a padded vocabulary's
        places = torch.arange(columns, device=DEVICE)
        return logits.masked_fill(places >= columns - masked, float("-inf"))

    def exact(logits):
        return F.cross_entropy(hide(logits), labels, reduction="none")

    logits = normal(rows, columns, dtype=dtype, scale=5.0)
    compare(lambda x: kernels.cross_entropy(hide(x), labels), exact, [logits], dtype)


def test_a_not_a_number_among_the_logits_is_not_lost():
    logits = normal(2, 50)
    logits[1, 7] = float("nan")
    losses = kernels.cross_entropy(logits, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    assert losses.isnan().tolist() == [False, True]


def test_what_computes_something_else_does_not_race():
    x = normal(8, 16).requires_grad_()
    ways = {"operators": lambda: x.sin(), "compiled": lambda: x.sin() * (1 + 1e-6)}
    operations.require_equal("sine", operations.Operation(ways, (x,)))
    wrong = {"output": lambda: x.sin() + 1e-3, "gradient": lambda: x.sin() + (x - x.detach()) / 99}
    for what, way in wrong.items():
        with pytest.raises(AssertionError, match=f"sine by {what}: "):
            operations.require_equal("sine", operations.Operation(ways | {what: way}, (x,)))


def test_they_compile_for_real_targets_without_spills():
    """In a process that does not interpret; needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_candidates.py")
    run = subprocess.run(
        [sys.executable, str(program), "80", "90", "100"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(" 0 B stack") == 3 * 2 * 8
