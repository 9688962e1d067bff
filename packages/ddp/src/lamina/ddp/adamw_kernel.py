"""The Triton kernel of AdamW; `fused_adamw` launches it.

The operations and their order are those of torch's foreach AdamW. Contraction to fused
multiply-adds is allowed, so results are held to a tolerance (1e-6), not to bits.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["adamw_kernel"]


@triton.jit
def _round_to_bfloat16(value):
    """Nearest even, by integer arithmetic: the interpreter's own cast truncates."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def adamw_kernel(
    main,
    gradient,
    average,
    square,
    weights,
    numel,
    step,
    lr,
    log_beta1,
    log_beta2,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    SIGN: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One pass: reads main weights, gradient and two moments; writes all but the gradient, and the
    weights in the compute dtype. `step` points to the fp32 count of steps, this one included.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    value = tl.load(main + offsets, mask=mask, other=0.0)
    slope = tl.load(gradient + offsets, mask=mask, other=0.0).to(tl.float32) * SIGN
    first = tl.load(average + offsets, mask=mask, other=0.0)
    second = tl.load(square + offsets, mask=mask, other=0.0)
    if DECOUPLED:
        value = value * (1.0 - lr * decay)
    else:
        slope = slope + decay * value
    first = first + (slope - first) * rest1
    second = second * beta2 + rest2 * slope * slope
    # In fp64: with beta2 = 0.999, fp32 would lose three digits of the first corrections.
    count = tl.load(step).to(tl.float64)
    correction1 = (1.0 - tl.exp2(count * log_beta1)).to(tl.float32)
    correction2 = (1.0 - tl.exp2(count * log_beta2)).to(tl.float32)
    value = value - (lr / correction1) * first / (tl.sqrt(second) / tl.sqrt(correction2) + eps)
    tl.store(main + offsets, value, mask=mask)
    tl.store(average + offsets, first, mask=mask)
    tl.store(square + offsets, second, mask=mask)
    if weights.dtype.element_ty == tl.bfloat16:
        tl.store(weights + offsets, _round_to_bfloat16(value), mask=mask)
    else:
        tl.store(weights + offsets, value.to(weights.dtype.element_ty), mask=mask)
