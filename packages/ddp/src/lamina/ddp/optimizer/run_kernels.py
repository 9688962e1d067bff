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
    """Unfused Adam and AdamW on a CPU, in blocks that stay in cache (decision 0406).

    Torch reads and writes whole tensors a dozen times and makes temporaries of their size, whose
    fresh pages cost as much as the arithmetic. Its own function over blocks gives the same bits in
    a third of the time, since the update of an element reads that element only.
    """
    if not _knows(optimizer, settings, state) or settings["fused"] or settings["differentiable"]:
        return False
    beta1, beta2 = settings["betas"]
    with torch.no_grad():
        for start in range(0, run.numel(), BLOCK):
            block = slice(start, start + BLOCK)
            adam(
                [run.data[block]],
                [run.grad[block]],  # type: ignore[index]
                [state["exp_avg"][block]],
                [state["exp_avg_sq"][block]],
                [],
                [state["step"].clone()],  # counted up by each call
                foreach=settings["foreach"],
                decoupled_weight_decay=_is_decoupled(optimizer, settings),
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=settings["lr"],
                weight_decay=settings["weight_decay"],
                eps=settings["eps"],
                maximize=settings["maximize"],
            )
        state["step"].add_(1)
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
    are gradients that a scaler left scaled.
    """
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

    Attributes:
        step: the kernel.
        writes_weights: whether it writes the module's weights too, so that nobody copies them.
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


def _is_decoupled(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    return isinstance(optimizer, AdamW) or bool(settings.get("decoupled_weight_decay"))
