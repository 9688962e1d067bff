"""Arguments of `fully_shard` that need hardware, or each other: refused here by name, or never."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from lamina.collectives import register_pool
from lamina.collectives.engine import RegisteredPool
from lamina.ddp.engine import registration_refusal

__all__ = ["BufferArguments", "SlotMemory", "UnavailableError"]


class UnavailableError(NotImplementedError):
    """An argument asks for what this machine or this build of Lamina does not have."""


@dataclass(frozen=True)
class BufferArguments:
    """Arguments about memory and number formats, under `fully_shard`'s own names."""

    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    disable_symmetric_registration: bool = False
    cuda_graph_mode: bool = False
    maxpool_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    gather_budget: int | None = None

    def check(
        self, gathering: Sequence[ProcessGroup | None], device: torch.device, *, gathers: bool
    ) -> None:
        """Refuse what cannot work.

        Args:
            gathering: the communicators of gathers; None for axes of one rank.
            device: where the model computes.
            gathers: whether the strategy gathers weights by units.

        Raises:
            UnavailableError: for what the hardware, or Lamina, lacks.
            ValueError: for arguments that need another one.
        """
        self._check_double_buffer()
        if self.fsdp_double_buffer and not gathers:
            raise ValueError(
                "fsdp_double_buffer=True is about the memory that units are gathered into, and "
                "this strategy keeps weights whole: use zero_dp_strategy=3, or leave it out"
            )
        if self.gather_budget is not None and (self.fsdp_double_buffer or not gathers):
            why = "fsdp_double_buffer=True gathers into fixed memory"
            raise ValueError(
                f"gather_budget={self.gather_budget} is about whole weights that come and go, and "
                f"{why if gathers else 'this strategy keeps weights whole'}: leave one of them out"
            )
        if self.cuda_graph_mode and device.type != "cuda":
            raise UnavailableError(
                f"cuda_graph_mode=True: the model is on {device}, and only CUDA has graphs"
            )
        if self.nccl_ub:
            self._check_registration(gathering, device)

    def _check_double_buffer(self) -> None:
        for name in (
            "maxpool_double_buffer",
            "fsdp_db_use_persist_buf_on_alloc_fail",
            "cuda_graph_mode",
        ):
            if getattr(self, name) and not self.fsdp_double_buffer:
                raise ValueError(
                    f"{name}=True is about the fixed buffers of fsdp_double_buffer=True, which is "
                    "off: turn it on, or leave this one out"
                )
        if self.disable_symmetric_registration and not self.nccl_ub:
            raise ValueError(
                "disable_symmetric_registration=True is about the memory that nccl_ub=True "
                "registers, which is off: turn it on, or leave this one out"
            )

    def _check_registration(
        self, gathering: Sequence[ProcessGroup | None], device: torch.device
    ) -> None:
        symmetric = not self.disable_symmetric_registration
        refusal = registration_refusal(gathering, device, symmetric=symmetric)
        if refusal is not None:
            raise UnavailableError(refusal)
        if not self.fsdp_double_buffer:
            raise ValueError(
                "nccl_ub=True registers the fixed buffers of fsdp_double_buffer=True, which is "
                "off: turn it on (memory that comes and goes cannot stay registered)"
            )

    def slot_memory(
        self, groups: Sequence[ProcessGroup | None], device: torch.device
    ) -> SlotMemory | None:
        """Where slots are allocated: in memory that NCCL has registered, or as any tensor (None).

        Args:
            groups: the communicators of gathers; None for axes of one rank.
            device: where the slots lie.
        """
        if not self.nccl_ub:
            return None
        several = {id(group): group for group in groups if group is not None}
        symmetric = not self.disable_symmetric_registration
        return SlotMemory(tuple(several.values()), device, symmetric=symmetric)


class SlotMemory:
    """Makes the registered memory that a plan's slots lie in, and lets go of it.

    Args:
        groups: communicators that gather into it.
        device: where it lies.
        symmetric: register symmetric windows.
    """

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
