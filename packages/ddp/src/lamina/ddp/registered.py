"""Memory that NCCL has registered, for the buffers that stay (`nccl_ub`)."""

from __future__ import annotations

import torch

from lamina.collectives import (
    RegisteredPool,
    RegistrationError,
    register_pool,
    registration_problem,
)
from lamina.ddp.axes import DataParallelAxes

__all__ = ["registered_pool"]


def registered_pool(
    axes: tuple[DataParallelAxes | None, ...], device: torch.device
) -> RegisteredPool:
    """A pool that the communicators of all data-parallel axes may use in place.

    Args:
        axes: of dense parameters, and of expert ones where the mesh tells them apart.
        device: where the model computes.

    Raises:
        RegistrationError: where hardware, build or backend lack it, with the reason.
    """
    purposes = ("gather", "reduce")
    groups = {
        id(group): group
        for kind in axes
        if kind is not None
        for purpose in purposes
        for group in kind.groups(purpose)
        if group is not None
    }
    where = device if device.type == "cuda" else None
    for group in groups.values() or [None]:
        problem = registration_problem(group, where)
        if problem is None and device.type != "cuda":
            problem = f"the model is on {device}, and NCCL registers only CUDA memory"
        if problem is not None:
            raise RegistrationError(f"nccl_ub=True: {problem}; leave it out here")
    return register_pool(list(groups.values()), device)
