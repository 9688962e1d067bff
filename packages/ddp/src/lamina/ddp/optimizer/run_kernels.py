"""Kernels that step a flat run at once, in place of an optimizer's own passes over it.

A kernel is a function of an optimizer, the settings of one of its groups, a run (flat main weights
with their gradient), the run's state and the module's weights. It steps the run in place and
returns True; or it leaves all as it was, and returns False, where the optimizer's own step would do
something else.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim.adam import adam

__all__ = ["BLOCK", "KERNELS", "RunKernel", "blocked_adam", "one_pass_adam"]

BLOCK = 1 << 18
"""Elements: 1 MiB of each of six tensors; temporaries below malloc's own threshold for `mmap`."""


def blocked_adam(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    run: nn.Parameter,
    state: Mapping[str, Any],
    weights: torch.Tensor | None = None,
) -> bool:
    """Adam and AdamW in blocks: unfused on a CPU, and wherever moments are kept in few bits.

    On a CPU the blocks stay in cache (decision 0406).
    Torch reads and writes whole tensors a dozen times and makes temporaries of their size, whose
    fresh pages cost as much as the arithmetic. Its own function over blocks gives the same bits in
    a third of the time, since the update of an element reads that element only. Moments of fewer
    bits (decision 0425) are widened for a block and rounded after it, so no whole ones exist.
    """
    if not _knows(optimizer, settings, state) or settings["differentiable"]:
        return False
    if settings["fused"] and not _is_narrow(run, state):
        return False
    beta1, beta2 = settings["betas"]
    size = BLOCK if run.device.type == "cpu" else BLOCK << 6
    counted = state["step"] + 1
    with torch.no_grad():
        for start in range(0, run.numel(), size):
            block = slice(start, start + size)
            kept = state["exp_avg"][block], state["exp_avg_sq"][block]
            wide = kept[0].to(run.dtype), kept[1].to(run.dtype)  # the same where the dtype is that
            counted = state["step"].clone()  # counted up by each call
            adam(
                [run.data[block]],
                [run.grad[block]],  # type: ignore[index]
                [wide[0]],
                [wide[1]],
                [],
                [counted],
                foreach=settings["foreach"],
                fused=settings["fused"],
                grad_scale=getattr(optimizer, "grad_scale", None),
                found_inf=getattr(optimizer, "found_inf", None),
                decoupled_weight_decay=_is_decoupled(optimizer, settings),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                maximize=settings["maximize"],
            )
            for moment, values in zip(kept, wide, strict=True):
                if moment is not values:
                    moment.copy_(values)
            if weights is not None:
                weights[block].copy_(run.data[block])
        state["step"].copy_(counted)
    return True


def one_pass_adam(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    run: nn.Parameter,
    state: Mapping[str, Any],
    weights: torch.Tensor | None,
) -> bool:
    """Fused Adam and AdamW on CUDA: one Triton kernel updates and casts, within 1e-6 of torch's.

    Main weights that share the module's weights have nothing to cast. Those are left to torch, as
    are gradients that a scaler left scaled. Moments of fewer bits are stepped in blocks.
    """
    if _is_narrow(run, state):
        return blocked_adam(optimizer, settings, run, state, weights)
    if (
        not _knows(optimizer, settings, state)
        or not settings["fused"]
        or weights is None
        or run.dtype != torch.float32
        or min(settings["betas"]) <= 0
        or getattr(optimizer, "grad_scale", None) is not None
        or getattr(optimizer, "found_inf", None) is not None
    ):
        return False
    try:
        from lamina.ddp.optimizer.adamw_cuda import fused_adamw
    except ImportError:  # without Triton, which CUDA builds of torch bring along
        return False
    state["step"].add_(1)
    fused_adamw(
        run.data,
        run.grad,  # type: ignore[arg-type]
        state["exp_avg"],
        state["exp_avg_sq"],
        weights,
        state["step"].to(run.device),
        lr=settings["lr"],
        betas=settings["betas"],
        eps=settings["eps"],
        weight_decay=settings["weight_decay"],
        maximize=settings["maximize"],
        decoupled=_is_decoupled(optimizer, settings),
    )
    return True


class RunKernel(NamedTuple):
    """What steps the runs on one type of device.

    One that `writes_weights` writes the weights of the module too, so that nobody copies them.
    """

    step: Callable[..., bool]
    writes_weights: bool


KERNELS: dict[str, RunKernel] = {
    "cpu": RunKernel(blocked_adam, writes_weights=False),
    "cuda": RunKernel(one_pass_adam, writes_weights=True),
}
"""By type of device."""


def _knows(optimizer: Optimizer, settings: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    """Whether this is Adam or AdamW in a step that kernels can do.

    The first step, which makes the state, is torch's; so are amsgrad, tensors as hyperparameters
    and captured steps.
    """
    return (
        type(optimizer) in (Adam, AdamW)
        and state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        and isinstance(settings["lr"], float)
        and isinstance(settings["betas"][0], float)
        and isinstance(settings["betas"][1], float)
        and not (settings["amsgrad"] or settings["capturable"])
    )


def _is_narrow(run: nn.Parameter, state: Mapping[str, Any]) -> bool:
    """Whether moments are kept in another dtype than the one that steps are made in."""
    return getattr(state.get("exp_avg"), "dtype", run.dtype) != run.dtype


def _is_decoupled(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, AdamW) or bool(settings.get("decoupled_weight_decay"))
