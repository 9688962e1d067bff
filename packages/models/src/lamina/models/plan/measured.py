"""What can be measured: a step on a device, and the constants of the cost model on a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from lamina.models.plan.constants import GPUS, Costs, Gpu
from lamina.models.plan.job import Job, program

Measured = Callable[..., dict[str, Any]]


def on_device(job: Job, measured_step: Measured, rank: int = 0) -> dict[str, Any]:
    """Run the job's step as one rank on a device that an entry point of `lamina.plan` names.

    Returns:
        At least `allocated` and `reserved`, bytes at the peak of a steady step.
    """

    @contextmanager
    def running() -> Iterator[Callable[[], None]]:
        with program(job, rank, torch.device("cuda", 0), backend=None) as playing:
            yield lambda: playing.step(None)

    return measured_step(rank * (job.ranks // job.layout.pp), job.ranks, running)


def calibrated(path: Path) -> Costs:
    """Constants from a file; if it is not there they are measured on this machine's GPU first.

    Raises:
        ValueError: there is neither the file nor a GPU, or the GPU has no profile.
    """
    if not path.is_file():
        if not torch.cuda.is_available():
            raise ValueError(f"--calibrate {path}: there is no such file, and no GPU to measure on")
        path.write_text(json.dumps(asdict(_measure(_profile())), indent=1) + "\n")
    return Costs(**json.loads(path.read_text()))


def _profile() -> Gpu:
    """The profile of this machine's GPU, by its name and memory."""
    own = torch.cuda.get_device_properties(0)
    near = [
        (abs(gpu.memory - own.total_memory), name)
        for name, gpu in GPUS.items()
        if name.split("-")[0] in own.name.lower().replace(" ", "")
    ]
    if not near:
        raise ValueError(f"--calibrate on {own.name}: profiles are {', '.join(GPUS)}")
    return GPUS[min(near)[1]]


def _measure(gpu: Gpu) -> Costs:
    """Products, attention, memory and launches of one GPU; links keep their constants."""
    where, wide = torch.device("cuda"), torch.bfloat16
    left, right = (torch.randn(8192, 8192, device=where, dtype=wide) for _ in range(2))
    product = 2.0 * 8192**3 / _seconds(lambda: left @ right) / gpu.bf16
    heads = torch.randn(3, 1, 32, 8192, 128, device=where, dtype=wide)
    pairs = 32 * 8192**2 / 2 * 256

    def attention() -> torch.Tensor:
        return F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)

    forward = 2.0 * pairs / _seconds(attention) / gpu.bf16
    heads.requires_grad_()
    grad = torch.ones_like(heads[0])
    both = _seconds(lambda: torch.autograd.backward(attention(), grad))
    backward = 5.0 * pairs / max(both - 2.0 * pairs / (gpu.bf16 * forward), 1e-9) / gpu.bf16
    big = torch.empty(1 << 28, device=where, dtype=wide)
    memory = 2.0 * big.nbytes / _seconds(lambda: big.mul_(1.0)) / gpu.bandwidth
    small = torch.empty(16, device=where)
    launch = _seconds(lambda: small.add_(1.0), times=2000)
    # A large product has almost reached the share that an endless one has.
    fit = (8192 / (8192 + Costs.half_rows)) ** 2 * 8192 / (8192 + Costs.half_inner)
    return replace(
        Costs(),
        product=product / fit,
        attention=forward,
        attention_backward=backward,
        memory=memory,
        launch=launch,
    )


def _seconds(work: Callable[[], object], times: int = 20) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times
