"""A step on the virtual GPU for a planner: what the real allocator has allocated and reserved.

The entry point `virtual-gpu` of the group `lamina.plan` names `measured_step`, so that a planner
finds it where this distribution is installed, and nothing imports it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lamina_virtual_gpu.recording import now, record, reset


@contextmanager
def played_rank(rank: int, ranks: int, per_host: int = 8) -> Iterator[None]:
    """Inside, this process is one rank of a world of NCCL that is not there."""
    import torch
    import torch.distributed as dist

    local = {
        "RANK": rank,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": min(per_host, ranks),
        # Of more ranks torch has several name the communicator, and the others do not exist.
        "TORCH_NCCL_RANKS_PER_ROOT": ranks,
        "LAMINA_RANKS_PER_HOST": min(per_host, ranks),
    }
    os.environ.update({name: str(value) for name, value in local.items()})
    torch.cuda.set_device(0)
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in its stubs
    dist.init_process_group("cpu:fake,cuda:nccl", store=store, rank=rank, world_size=ranks)
    yield


def measured_step(
    rank: int, ranks: int, program: Callable[[], AbstractContextManager[Callable[[], None]]]
) -> dict[str, Any]:
    """Run three steps of a program as one rank, and measure the third.

    Args:
        rank: which one is played.
        ranks: of the whole world.
        program: a context manager that yields a function that runs a step on the GPU.

    Returns:
        `allocated` and `reserved` bytes at the peak, `seconds` of the virtual clock (which is not
        calibrated), `launches` and `flops`.
    """
    import torch

    with played_rank(rank, ranks), program() as step:
        step()
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = now()
        reset()
        step()
        seen = record()
        torch.cuda.synchronize()
        stats = torch.cuda.memory_stats()
        return {
            "allocated": stats["allocated_bytes.all.peak"],
            "reserved": stats["reserved_bytes.all.peak"],
            "seconds": now() - begun,
            "launches": seen.launches,
            "flops": seen.operations,
        }
