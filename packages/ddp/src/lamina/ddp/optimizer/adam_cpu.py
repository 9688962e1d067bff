"""Adam's step over a flat run on a CPU, block by block, so that its dozen passes stay in cache.

Torch's unfused Adam reads and writes whole tensors a dozen times and makes temporaries of their
size, whose fresh pages cost as much as the arithmetic. The same functions over blocks give the
same bits (the update of an element reads that element only), in a third of the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.adam import adam

__all__ = ["launch", "takes"]

_BLOCK = 1 << 18
"""Elements: 1 MiB of each of six tensors; temporaries below malloc's own threshold for `mmap`."""


def takes(
    optimizer: Optimizer, settings: Mapping[str, Any], state: Mapping[str, Any], run: torch.Tensor
) -> bool:
    """Whether `launch` can do a run's update: unfused Adam or AdamW that has stepped before.

    The first step, which makes the state, is torch's; so are amsgrad, tensors as hyperparameters
    and steps that are differentiated.
    """
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and run.device.type == "cpu"
        and {"step", "exp_avg", "exp_avg_sq"} == set(state)
        and not (settings["fused"] or settings["amsgrad"])
        and not (settings["capturable"] or settings["differentiable"])
        and isinstance(settings["lr"], float)
        and all(isinstance(beta, float) for beta in settings["betas"])
    )


@torch.no_grad()
def launch(
    optimizer: Optimizer,
    settings: Mapping[str, Any],
    state: Mapping[str, Any],
    run: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """Step a run (flat); the state's tensors are flat as well, and updated in place."""
    first, second = settings["betas"]
    decoupled = isinstance(optimizer, torch.optim.AdamW)
    for start in range(0, run.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        adam(
            [run[block]],
            [gradient[block]],
            [state["exp_avg"][block]],
            [state["exp_avg_sq"][block]],
            [],
            [state["step"].clone()],  # counted up by each call
            foreach=settings["foreach"],
            decoupled_weight_decay=decoupled or bool(settings.get("decoupled_weight_decay")),
            amsgrad=False,
            beta1=first,
            beta2=second,
            lr=settings["lr"],
            weight_decay=settings["weight_decay"],
            eps=settings["eps"],
            maximize=settings["maximize"],
        )
    state["step"].add_(1)
