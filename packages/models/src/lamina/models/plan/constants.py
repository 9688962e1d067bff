"""The constants of the cost model, in one place.

Looked up on 2026-11-26: an H100's rates and bandwidth (glennklockwood.com/garden/processors/h100,
not NVIDIA's own sheet), 35% of its peak for FlashAttention-2 (Shah et al., abstract), and 360 GB/s
inside a host, which NCCL's maintainer expects (NVIDIA/nccl-tests issue 326). The other sources were
written from memory. Latencies and small products are judgements. What is marked *measured* is of an
H200 (2026-11-26, `docs/records/hardware.md`). What is marked *fitted* was chosen on one half of the
published rows (`docs/records/plan.md`) and judged on the other half.
`python -m lamina.models.plan --calibrate` measures them on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet; rates are dense peaks in one direction.

    Attributes:
        memory: bytes that CUDA reports.
        bf16, fp8, fp32: operations per second of products.
        bandwidth: bytes per second of the memory.
        link: bytes per second of NVLink, to all GPUs of the host together.
        network: bytes per second of the GPU's share of its host's network.
        host: bytes per second of copies between pinned memory of the host and the GPU, each way
            (some 0.8 of PCIe 4 or 5).
        workspaces: bytes that cuBLAS keeps in PyTorch's allocator, for the thread of the program
            and for that of autograd (`CUBLAS_WORKSPACE_CONFIG`; PyTorch takes 32 MiB for each
            since Hopper, and 8.1 before).
    """

    memory: int
    bf16: float
    fp8: float
    fp32: float
    bandwidth: float
    link: float
    network: float
    workspaces: int = 64 << 20
    host: float = 50e9


# Data sheets of NVIDIA: H100 (2023), H200 (2024), A100 (2021), DGX B200 (2024). Networks are those
# of DGX systems: 400 Gbit/s per GPU, A100 200 Gbit/s. `h100-96gb` is the H100 of torchtitan's
# tables (96 GB of HBM2e, 500 W): its bandwidth is that of Grand Teton's part, 2.4 TB/s.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        "a100": Gpu(
            int(79.15 * GIB), 312e12, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 17 << 20, 25e9
        ),
        "h100-80gb": Gpu(int(79.18 * GIB), 989e12, 1979e12, 67e12, 3.352e12, 450e9, 50e9),
        "h100-96gb": Gpu(int(95.04 * GIB), 989e12, 1979e12, 67e12, 2.4e12, 450e9, 50e9),
        "h200": Gpu(int(139.8 * GIB), 989e12, 1979e12, 67e12, 4.8e12, 450e9, 50e9),
        "b200": Gpu(int(178.4 * GIB), 2250e12, 4500e12, 75e12, 7.7e12, 900e9, 50e9),
    }
)


def workspaces_of(gpu: Gpu) -> int:
    """Bytes of workspaces in the allocator of this torch: none since 2.15."""
    major, minor = torch.__version__.split(".")[:2]
    return gpu.workspaces if (int(major), int(minor)) < (2, 15) else 0


@dataclass(frozen=True)
class Costs:
    """What of a data sheet's rate is reached, and what each call costs.

    Attributes:
        product: share of the peak that a large product reaches in a long run (*fitted*; the H200
            measured 0.836 in products alone).
        fp8_product: the same in FP8 (*fitted*). Its casts are kernels of their own.
        half_rows, half_inner: rows (or columns) and inner length at which a product reaches half
            of that. A tile of cuBLAS has 128 rows, and a wave of tiles is filled at some 1,000
            (NVIDIA, Matrix Multiplication Background, 2023).
        attention, attention_backward: share of the bf16 peak that attention reaches (*measured*,
            head width 128, causal).
        memory: share of the memory's bandwidth that an element-wise kernel reaches (*measured*).
        fused: share of the bytes of element-wise kernels that is left where blocks are compiled and
            their graphs are not played (as in played steps of Llama 3 8B: 0.49 to 0.53).
        launch: seconds of the host for each operator (PyTorch 2, eager; *measured*).
        link, network: share of a link's bandwidth that large messages reach (nccl-tests on
            DGX H100: 370 of 450 GB/s inside a host, 45 of 50 between hosts).
        latency: seconds of a message inside a host, and between hosts, for each step of a ring.
        latency_between: see `latency`.
        context: bytes that CUDA, cuBLAS and NCCL take outside PyTorch's allocator.
        reserved: what the allocator reserves for each byte that is allocated at the peak, in closed
            forms alone. Where a step is played, its allocations are.
    """

    product: float = 0.6524
    fp8_product: float = 0.4588
    half_rows: float = 96.0
    half_inner: float = 96.0
    attention: float = 0.624
    attention_backward: float = 0.421
    memory: float = 0.874
    fused: float = 0.5
    launch: float = 7.5e-6
    link: float = 0.82
    network: float = 0.9
    latency: float = 4e-6
    latency_between: float = 12e-6
    context: int = int(1.5 * GIB)
    reserved: float = 1.067


# torchtitan's H100 is held to 500 W, where others have 700. Its two shares of products are
# *fitted*; its attention is version 2 of FlashAttention, at 335 and 290 TFLOP/s (Shah et al., 2024,
# figures 5 and 6, head width 128, causal).
OWN_COSTS: Mapping[str, Costs] = MappingProxyType(
    {
        "h100-96gb": Costs(
            product=0.4735,
            fp8_product=0.5066,
            attention=0.34,
            attention_backward=0.29,
            memory=0.85,
            launch=5e-6,
        )
    }
)


@dataclass(frozen=True)
class Machine:
    """A GPU, what of it is reached, and how many of them a host has."""

    gpu: Gpu
    costs: Costs = field(default_factory=Costs)
    per_host: int = 8


def machine(name: str, costs: Costs | None = None) -> Machine:
    """A machine by its GPU's name, with that GPU's own costs unless others are given.

    Raises:
        ValueError: the name is not known. The message lists those that are.
    """
    if name not in GPUS:
        raise ValueError(f"gpu {name!r} is not known: choose one of {', '.join(GPUS)}")
    return Machine(GPUS[name], costs or OWN_COSTS.get(name) or Costs())
