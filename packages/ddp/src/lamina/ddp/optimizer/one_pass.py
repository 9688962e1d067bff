"""Which runs of a step one Triton kernel takes: update and cast in a single pass over the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["launch", "takes"]

DEVICES = ("cuda",)
"""Device types on which kernels are launched."""


def takes(
    optimizer: Optimizer, settings: Mapping[str, Any], state: Mapping[str, Any], run: torch.Tensor
) -> bool:
    """Whether `launch` can do a run's update: fused Adam or AdamW that has stepped before.

    The first step, which makes the state, is torch's; so are amsgrad, tensors as learning rates,
    captured steps and gradients that a scaler left scaled.
    """
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and bool(settings.get("fused"))
        and run.device.type in DEVICES
        and run.dtype == torch.float32
        and {"step", "exp_avg", "exp_avg_sq"} == set(state)
        and isinstance(settings["lr"], float)
        and all(isinstance(beta, float) and beta > 0 for beta in settings["betas"])
        and not settings["amsgrad"]
        and not settings["capturable"]
        and getattr(optimizer, "grad_scale", None) is None
        and getattr(optimizer, "found_inf", None) is None
        and _kernel() is not None
    )


def launch(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
    run: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Step a run (flat, float32), and write `weights` (flat, its compute dtype) with it."""
    kernel = _kernel()
    if kernel is None:
        raise RuntimeError("launch without Triton: ask `takes` first")
    state["step"].add_(1)
    kernel(
        run,
        gradient,
        state["exp_avg"],
        state["exp_avg_sq"],
        weights,
        state["step"].to(run.device),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        maximize=settings["maximize"],
        decoupled=isinstance(optimizer, torch.optim.AdamW)
        or bool(settings.get("decoupled_weight_decay")),
    )


def _kernel() -> Callable[..., None] | None:
    """The kernel; None without Triton (CUDA builds of torch bring it along)."""
    try:
        from lamina.ddp.optimizer.adamw_cuda import fused_adamw
    except ImportError:
        return None
    return fused_adamw
