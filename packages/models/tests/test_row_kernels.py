"""The kernels of rows of tokens on GPUs: interpreted beside float64, and compiled for GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lamina.models.moe.routing import (
    copies_to_rows,
    rows_by_expert,
    rows_to_capacity,
    rows_to_tokens,
)
from lamina.models.plan import StepRecorder

pytest.importorskip("triton")

COMPILED = Path(__file__).with_name("compile_row_kernels.py")
# On a CPU tensors go to the kernels where Triton is interpreted.
PROGRAM = """
import torch
from lamina.models.moe.row_kernels import BLOCK, copy_rows, differentiate_rows, sum_rows
from lamina.models.moe.routing import rows_by_expert, rows_to_capacity

torch.manual_seed(0)
cases = [(5, 1, 3, False), (7, 3, BLOCK + 40, False), (6, 2, 24, True), (0, 2, 8, False)]
for tokens, copies, hidden, holes in cases:
    experts = torch.rand(tokens, 5).argsort(1)[:, :copies]
    if holes:
        experts[::2, 0] = 5  # no expert: a copy without a row, and rows without a copy
    order = rows_to_capacity(experts, 5, tokens + 1) if holes else rows_by_expert(experts)
    count = len(order.copy_of_row)
    rows, weights = torch.randn(count, hidden), torch.rand(tokens, copies)
    # The oracle is a matrix: a row for each token, a column for each row.
    places = torch.nn.functional.one_hot(order.row_of_copy, count + 1)[..., :count].double()
    x, copied = torch.randn(tokens, hidden), torch.full_like(rows, torch.nan)
    copy_rows(x, order.copy_of_row, copies, copied)
    assert torch.equal(copied.double(), places.sum(1).T @ x.double())
    for factors in (weights, torch.ones_like(weights)):
        total = torch.full((tokens, hidden), torch.nan)
        sum_rows(rows, order.row_of_copy, factors if factors is weights else None, total)
        matrix = (places * factors.double().unsqueeze(-1)).sum(1)
        torch.testing.assert_close(total.double(), matrix @ rows.double(), rtol=1e-6, atol=1e-6)
    grad = torch.randn(tokens, hidden)
    grad_rows, grad_weights = torch.full_like(rows, torch.nan), torch.zeros_like(weights)
    differentiate_rows(rows, grad, weights, order.copy_of_row, grad_rows, grad_weights)
    matrix = (places * weights.double().unsqueeze(-1)).sum(1)
    torch.testing.assert_close(grad_rows.double(), matrix.T @ grad.double(), rtol=1e-6, atol=1e-6)
    expected = (places @ rows.double() * grad.double().unsqueeze(1)).sum(-1)
    torch.testing.assert_close(grad_weights.double(), expected, rtol=1e-5, atol=1e-5)
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


def test_interpreted_sums_and_gradients_are_those_of_a_matrix_in_float64():
    assert "fine" in run([sys.executable, "-c", PROGRAM], "1")


def test_compiled_they_read_16_bytes_at_a_time_and_round_each_product():
    assert run([sys.executable, str(COMPILED), "80", "90", "100"], "").count(" 0 B stack") == 12


def test_a_plan_counts_each_row_once_for_each_pass():
    tokens, copies, hidden = 6, 2, 64
    meta = {"device": "meta", "dtype": torch.bfloat16}
    order = rows_by_expert(torch.zeros(tokens, copies, dtype=torch.int64, device="meta"))
    x = torch.empty(tokens, hidden, **meta, requires_grad=True)
    weights = torch.empty(tokens, copies, device="meta", requires_grad=True)
    with StepRecorder("meta") as recorder:
        total = rows_to_tokens(copies_to_rows(x, order), weights, order)
        total.backward(torch.empty_like(total))
    moved = {each.name: each.nbytes for each in recorder.record.operations}
    count, index, factors = tokens * copies, 8 * tokens * copies, 4 * tokens * copies
    few, many = 2 * tokens * hidden, 2 * count * hidden
    assert moved.pop("lamina::rows_of_tokens") == few + index + many
    assert moved.pop("lamina::gradients_of_rows") == 2 * many + few + 2 * index + 2 * factors
    # The last one is that of the backward, which has no weights.
    assert moved.pop("lamina::sum_of_rows") == many + index + few
    assert not moved


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpus_sums_have_the_bits_of_a_cpu(dtype, holes):
    torch.manual_seed(0)
    experts = torch.rand(19, 6).argsort(1)[:, :3]
    if holes:
        experts[::4, 1] = 6
    x, weights, grad = torch.randn(19, 40), torch.rand(19, 3), torch.randn(19, 40)
    results = []
    for device in ("cpu", "cuda"):
        ids = experts.to(device)
        order = rows_to_capacity(ids, 6, 19) if holes else rows_by_expert(ids)
        tokens = x.to(device, dtype).detach().requires_grad_()
        factors = weights.to(device).detach().requires_grad_()
        total = rows_to_tokens(copies_to_rows(tokens, order) * 3, factors, order)
        total.backward(grad.to(device, dtype))
        results.append((total.detach(), tokens.grad, factors.grad))
    on_cpu, on_gpu = results
    for expected, got in zip(on_cpu[:2], on_gpu[:2], strict=True):
        assert torch.equal(expected, got.cpu())
    # The sum over a row has an order of its own on each device.
    torch.testing.assert_close(on_cpu[2], on_gpu[2].cpu(), rtol=1e-5, atol=1e-5)
