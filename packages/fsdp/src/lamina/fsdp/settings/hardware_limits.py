"""Settings that need hardware: refused by name where it is lacking."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed import ProcessGroup

from lamina.collectives import register_pool
from lamina.collectives.engine import RegisteredPool
from lamina.ddp.engine import UnavailableError, registration_refusal
from lamina.fsdp.settings.sharding_settings import ShardingSettings

__all__ = ["SlotMemory", "slot_memory"]


class SlotMemory:
    """Makes the registered memory of a plan's slots for the groups that gather into it."""

    def __init__(
        self, groups: Sequence[ProcessGroup], device: torch.device, *, symmetric: bool
    ) -> None:
        self._groups = tuple(groups)
        self._device = device
        self._symmetric = symmetric
        self._pools: list[RegisteredPool] = []

    def allocating(self) -> AbstractContextManager[object]:
        """Entered around the allocation of all slots: registers them at the end (collective)."""
        pool = register_pool(self._groups, self._device, symmetric=self._symmetric)
        self._pools.append(pool)
        return pool

    def close(self) -> None:
        """Deregister, on all ranks, before the process group is destroyed."""
        for pool in self._pools:
            pool.close()
        self._pools.clear()


def slot_memory(
    settings: ShardingSettings, groups: Sequence[ProcessGroup | None], device: torch.device
) -> SlotMemory | None:
    """Where slots are allocated: in memory that NCCL registers, or as any tensor (None).

    `groups` gather; None is an axis of one rank. UnavailableError says what the hardware, or this
    build of torch, lacks, and ValueError refuses registered memory that is not fixed.
    """
    if settings.cuda_graph_mode and device.type != "cuda":
        raise UnavailableError(
            f"cuda_graph_mode=True: the model is on {device}, and only CUDA has graphs"
        )
    if not settings.nccl_ub:
        return None
    symmetric = not settings.disable_symmetric_registration
    refusal = registration_refusal(groups, device, symmetric=symmetric)
    if refusal is not None:
        raise UnavailableError(refusal)
    if not settings.fsdp_double_buffer:
        raise ValueError(
            "nccl_ub=True registers the fixed buffers of fsdp_double_buffer=True, which is off: "
            "turn it on (memory that comes and goes cannot stay registered)"
        )
    several = {id(group): group for group in groups if group is not None}
    return SlotMemory(tuple(several.values()), device, symmetric=symmetric)
