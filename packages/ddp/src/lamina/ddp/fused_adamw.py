"""AdamW over a flat run, writing the compute-dtype weights in the same pass (Triton)."""

from __future__ import annotations

import math

import torch
import triton

from lamina.ddp.adamw_kernel import adamw_kernel

__all__ = ["BLOCK", "WARPS", "fused_adamw"]

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

    Args:
        main: main weights: flat [n], float32.
        gradient: main grads: flat [n], float32 or narrower.
        average: first moment: flat [n], float32.
        square: second moment: flat [n], float32.
        weights: flat [n], any floating dtype: gets the new main weights, rounded to nearest even.
        step: number of this step, from 1: no dimensions, float32, on the same device.
        lr: learning rate.
        betas: decay of the moments, both above 0.
        eps: added to the root of the second moment.
        weight_decay: decoupled from the gradient; with `decoupled=False` added to it (Adam).
        maximize: step up the gradient.
        decoupled: AdamW's weight decay.

    Raises:
        ValueError: tensors that are not flat and of one length.
    """
    tensors = (main, gradient, average, square, weights)
    if any(t.dim() != 1 or not t.is_contiguous() or t.numel() != main.numel() for t in tensors):
        raise ValueError(
            f"fused_adamw takes flat contiguous tensors of one length, not "
            f"{[tuple(tensor.shape) for tensor in tensors]}"
        )
    if main.numel() == 0:
        return
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
