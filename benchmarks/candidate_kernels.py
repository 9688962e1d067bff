"""Triton kernels that `lamina.models` could use, if a GPU shows that they win.

RMSNorm, RoPE, SwiGLU and cross-entropy, forward and backward, each one pass over what it reads
and writes. They are no part of the package (docs/decisions/0662): `blocks.py --kernels` races
them against torch's operators and Inductor. All compute in fp32 and round once, to the inputs'
dtype; sums over rows are taken in an order that depends on nothing but the shapes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS_PER_PROGRAM = 16  # of RMSNorm's backward, which adds up the weight's gradient over them
COLUMNS = 4096  # of a row of logits that are held at once


@triton.jit
def rms_norm_kernel(x, weight, y, inverse, width, eps, BLOCK: tl.constexpr):
    """One program per row; also keeps 1 / rms."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    values = tl.load(x + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(values * values, axis=0) / width + eps)
    factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    result = values * scale * factors
    tl.store(y + row * width + columns, result.to(y.dtype.element_ty), mask=mask)
    tl.store(inverse + row, scale)


@triton.jit
def rms_norm_backward_kernel(
    grad, x, weight, inverse, grad_x, partials, rows, width, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """One program per ROWS rows; stores its part of the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for step in range(ROWS):
        row = program * ROWS + step
        # One comparison: Triton 3.9's interpreter takes no scalar for a part of a mask.
        here = columns < tl.where(row < rows, width, 0)
        place = row * width + columns
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)
        normed = tl.load(x + place, mask=here, other=0.0).to(tl.float32) * scale
        above = tl.load(grad + place, mask=here, other=0.0).to(tl.float32)
        total += above * normed
        above = above * factors
        along = tl.sum(above * normed, axis=0) / width
        result = (above - normed * along) * scale
        tl.store(grad_x + place, result.to(grad_x.dtype.element_ty), mask=here)
    tl.store(partials + program * width + columns, total, mask=mask)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, width = x.shape
        y, inverse = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        rms_norm_kernel[(rows,)](
            x, weight, y, inverse, width, eps, BLOCK=block, num_warps=warps_of(block)
        )
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        rows, width = x.shape
        programs = triton.cdiv(rows, ROWS_PER_PROGRAM)
        grad_x = torch.empty_like(x)
        partials = torch.empty(programs, width, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        rms_norm_backward_kernel[(programs,)](
            grad.contiguous(), x, weight, inverse, grad_x, partials, rows, width,
            BLOCK=block, ROWS=ROWS_PER_PROGRAM, num_warps=warps_of(block),
        )  # fmt: skip
        return grad_x, partials.sum(dim=0).to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Each row of `x` ``[rows, width]`` over its root mean square, times `weight` ``[width]``."""
    result: Tensor = _RMSNorm.apply(x, weight, eps)
    return result


@triton.jit
def rope_kernel(x, cos, sin, y, heads, SIGN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr):
    """One program per token: turn (first, second) halves of every head by SIGN times the angle."""
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    place = token * heads * 2 * HALF + head * 2 * HALF + column
    mask = (head < heads) & (column < HALF)
    first = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + place + HALF, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + column)
    s = tl.load(sin + token * HALF + column) * SIGN
    tl.store(y + place, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
    tl.store(y + place + HALF, (second * c + first * s).to(y.dtype.element_ty), mask=mask)


class _RoPE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _turned(grad.contiguous(), *ctx.saved_tensors, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    tokens, heads, width = x.shape
    y, padded = torch.empty_like(x), triton.next_power_of_2(heads)
    rope_kernel[(tokens,)](
        x, cos, sin, y, heads, SIGN=sign, HEADS=padded, HALF=width // 2,
        num_warps=warps_of(padded * width // 2),
    )  # fmt: skip
    return y


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `x` ``[tokens, heads, width]`` by angles of `cos`, `sin` fp32 ``[tokens, width / 2]``.

    `width` is twice a power of two. The halves of a head are the two coordinates, as in Llama.
    """
    result: Tensor = _RoPE.apply(x, cos, sin)
    return result


@triton.jit
def swiglu_kernel(x, y, width, BLOCK: tl.constexpr):
    """silu(gate) * up for one block of a row ``[gate, up]``."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    gate = tl.load(x + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(grad, x, grad_x, width, BLOCK: tl.constexpr):
    """Both halves of the gradient, into one tensor: nothing to concatenate."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    above = tl.load(grad + row * width + column, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * width + width + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    to_gate = above * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    to_up = above * gate * sigmoid
    kind = grad_x.dtype.element_ty
    tl.store(grad_x + row * 2 * width + column, to_gate.to(kind), mask=mask)
    tl.store(grad_x + row * 2 * width + width + column, to_up.to(kind), mask=mask)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, width = x.shape[0], x.shape[1] // 2
        y = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        block = min(1024, triton.next_power_of_2(width))
        swiglu_kernel[rows, triton.cdiv(width, block)](x, y, width, BLOCK=block, num_warps=4)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        rows, width = x.shape[0], x.shape[1] // 2
        grad_x, block = torch.empty_like(x), min(1024, triton.next_power_of_2(width))
        swiglu_backward_kernel[rows, triton.cdiv(width, block)](
            grad.contiguous(), x, grad_x, width, BLOCK=block, num_warps=4
        )
        return grad_x


def swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of `x` ``[rows, 2 width]``, whose halves are gate and up."""
    result: Tensor = _SwiGLU.apply(x)
    return result


@triton.jit
def cross_entropy_kernel(logits, labels, losses, log_totals, columns, BLOCK: tl.constexpr):
    """One program per row: the largest logit and the sum of exponentials in one pass."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    start = 0
    while start < columns:  # not range(columns): the interpreter of triton 3.6 fails on it
        place = start + tl.arange(0, BLOCK)
        mask = place < columns
        values = tl.load(logits + row * columns + place, mask=mask, other=float("-inf"))
        values = values.to(tl.float32)
        higher = tl.maximum(largest, values)
        # Masked logits are -inf, as is what nothing was seen of: -inf - -inf would be NaN.
        rescaled = tl.where(total == 0, 0.0, total * tl.exp(largest - higher))
        total = rescaled + tl.where(values == float("-inf"), 0.0, tl.exp(values - higher))
        largest = higher
        start += BLOCK
    top = tl.max(largest, axis=0)
    parts = tl.where(total == 0, 0.0, total * tl.exp(largest - top))
    log_total = top + tl.log(tl.sum(parts, axis=0))
    label = tl.load(labels + row)
    chosen = tl.load(logits + row * columns + label).to(tl.float32)
    tl.store(losses + row, log_total - chosen)
    tl.store(log_totals + row, log_total)


@triton.jit
def cross_entropy_backward_kernel(
    grad, logits, labels, log_totals, grad_logits, columns, BLOCK: tl.constexpr
):
    """One block of a row: (softmax - one-hot) times the row's gradient."""
    row, place = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < columns
    values = tl.load(logits + row * columns + place, mask=mask, other=0.0).to(tl.float32)
    probabilities = tl.exp(values - tl.load(log_totals + row))
    ones = tl.where(place == tl.load(labels + row), 1.0, 0.0)
    result = (probabilities - ones) * tl.load(grad + row)
    kind = grad_logits.dtype.element_ty
    tl.store(grad_logits + row * columns + place, result.to(kind), mask=mask)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        rows, columns = logits.shape
        losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
        log_totals, block = torch.empty_like(losses), min(COLUMNS, triton.next_power_of_2(columns))
        cross_entropy_kernel[(rows,)](
            logits, labels, losses, log_totals, columns, BLOCK=block, num_warps=warps_of(block)
        )
        ctx.save_for_backward(logits, labels, log_totals)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_totals = ctx.saved_tensors
        rows, columns = logits.shape
        grad_logits, block = torch.empty_like(logits), min(COLUMNS, triton.next_power_of_2(columns))
        cross_entropy_backward_kernel[rows, triton.cdiv(columns, block)](
            grad.contiguous(), logits, labels, log_totals, grad_logits, columns,
            BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return grad_logits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses ``[rows]``, fp32, of `logits` ``[rows, columns]`` for int64 `labels` ``[rows]``."""
    result: Tensor = _CrossEntropy.apply(logits, labels)
    return result


def warps_of(elements: int) -> int:
    """Warps of a program that holds so many elements of each tensor: 16 each a thread at most."""
    return min(16, max(1, elements // 512))
