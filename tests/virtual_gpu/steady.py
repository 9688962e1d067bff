"""What a steady step asks of the virtual GPU, and what is wrong with that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import lamina_virtual_gpu as virtual_gpu


def of_call(step: Callable[[], None]) -> dict[str, Any]:
    """What a step asks of the GPU, by its host."""
    before = torch.cuda.memory_stats()
    virtual_gpu.reset()
    with virtual_gpu.host_waits() as waits:
        step()
    calls, stats = virtual_gpu.record().calls, torch.cuda.memory_stats()
    return {
        "device": sum(calls.get(n, 0) for n in ("cudaMalloc", "cudaFree", "cuMemCreate")),
        "blocks": stats["allocation.all.allocated"] - before["allocation.all.allocated"],
        "left": stats["allocated_bytes.all.current"],
        "not modelled": virtual_gpu.record().not_modelled,
        "waits": [list(lines) for lines in waits],
    }


def step_complaints(steps: list[dict[str, Any]], may_wait: str | None) -> Iterator[str]:
    """What two steady steps must not do. The host waits in the file `may_wait` alone."""
    first, second = steps
    for name in ("blocks", "left"):
        if first[name] != second[name]:
            yield f"{name}: {first[name]} in a step, {second[name]} in the next one"
    if second["device"]:
        yield f"the allocator asks the device {second['device']} times in a steady step"
    yield from second["not modelled"]
    for what, *lines in second["waits"]:
        if may_wait is None or not any(may_wait in line for line in lines):
            yield f"the host waits by {what} at {' < '.join(lines)}"
