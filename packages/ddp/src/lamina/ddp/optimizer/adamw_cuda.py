"""AdamW over a flat run, writing the compute-dtype weights in the same pass (Triton)."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import math

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 1024, 4


def fused_adamw(
    main: torch.Tensor,
    gradient: torch.Tensor,
    average: torch.Tensor,
    square: torch.Tensor,
    weights: torch.Tensor,
    step: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    decoupled: bool = True,
) -> None:
    """One step of AdamW (Loshchilov and Hutter 2019), in place, within 1e-6 of torch's foreach.

    `main`, `average` and `square` are flat float32 [n], `gradient` is that or narrower. `weights`
    [n], of any floating dtype, get the new main weights, rounded to nearest even. `step`, from 1,
    has no dimensions and is float32 on the same device. Weight decay is added to the gradient
    unless it is `decoupled` (AdamW). ValueError: tensors that are not flat and of one length.
    """
    tensors = (main, gradient, average, square, weights)
    if any(t.dim() != 1 or not t.is_contiguous() or t.numel() != main.numel() for t in tensors):
        raise ValueError(
            f"fused_adamw takes flat contiguous tensors of one length, not "
            f"{[tuple(tensor.shape) for tensor in tensors]}"
        )
    if main.numel() == 0:
        return
    # Triton launches on the current GPU, whatever it is given.
    with torch.cuda.device_of(main):  # type: ignore[no-untyped-call]
        adamw_kernel[(triton.cdiv(main.numel(), BLOCK),)](
            main,
            gradient,
            average,
            square,
            weights,
            main.numel(),
            step,
            lr,
            math.log2(betas[0]),
            math.log2(betas[1]),
            1.0 - betas[0],
            betas[1],
            1.0 - betas[1],
            eps,
            weight_decay,
            SIGN=-1 if maximize else 1,
            DECOUPLED=decoupled,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


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
