"""Memory that NCCL has registered, for the buffers that stay (`nccl_ub`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed import ProcessGroup

from lamina.collectives import (
    RegisteredPool,
    RegistrationError,
    register_pool,
    registration_problem,
)
from lamina.ddp.axes import DataParallelAxes

__all__ = ["registered_pool", "registration_refusal"]


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
    found = [
        group
        for kind in axes
        if kind is not None
        for purpose in ("gather", "reduce")
        for group in kind.groups(purpose)
    ]
    refusal = registration_refusal(found, device)
    if refusal is not None:
        raise RegistrationError(refusal)
    return register_pool(list({id(one): one for one in found if one is not None}.values()), device)


def registration_refusal(
    groups: Iterable[ProcessGroup | None], device: torch.device, *, symmetric: bool = True
) -> str | None:
    """Why `nccl_ub` cannot be had, for an error; None if it can.

    Args:
        groups: the communicators that are to use registered memory; None for axes of one rank.
        device: where that memory lies.
        symmetric: whether it is to have symmetric windows.
    """
    where = device if device.type == "cuda" else None
    several: list[ProcessGroup | None] = [one for one in groups if one is not None]
    for group in several or [None]:
        problem = registration_problem(group, where, symmetric=symmetric)
        if problem is None and device.type != "cuda":
            problem = f"the model is on {device}, and NCCL registers only CUDA memory"
        if problem is not None:
            return f"nccl_ub=True: {problem}; leave it out here"
    return None
