"""The GPUs that can be played: what their data sheets say."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Profile:
    """A GPU as its data sheet describes it; rates are peaks, in one direction, without sparsity.

    Args:
        key: what `VGPU_GPU` names it by.
        name: what CUDA calls it.
        major, minor: compute capability.
        processors: streaming multiprocessors.
        memory_gib: what CUDA reports as the device's memory, GiB.
        l2_mib, shared_per_processor_kib: cache, and shared memory of a multiprocessor.
        memory_gbs, link_gbs, network_gbs, host_gbs: GB/s of its memory, of NVLink, of its share of
            the network, of the way to the host.
        bf16_tflops, tf32_tflops, fp32_tflops, fp8_tflops: dense products.
        link_domain: how many GPUs NVLink joins.
        multicast: whether its switch adds up and sends to many (NVLS).
    """

    key: str
    name: str
    major: int
    minor: int
    processors: int
    memory_gib: float
    l2_mib: float
    shared_per_processor_kib: float
    memory_gbs: float
    link_gbs: float
    network_gbs: float
    host_gbs: float
    bf16_tflops: float
    tf32_tflops: float
    fp32_tflops: float
    fp8_tflops: float
    link_domain: int
    multicast: bool


# fp8 of an A100, which has none, is what it does in bf16.
PROFILES = (
    Profile(
        "a100", "NVIDIA A100-SXM4-80GB", 8, 0, 108, 79.15, 40, 164,
        2039, 300, 25, 25, 312, 156, 19.5, 312, 8, False,
    ),
    Profile(
        "h100", "NVIDIA H100 80GB HBM3", 9, 0, 132, 79.18, 50, 228,
        3352, 450, 50, 50, 989, 494, 67, 1979, 8, True,
    ),
    Profile(
        "h200", "NVIDIA H200", 9, 0, 132, 139.8, 50, 228,
        4800, 450, 50, 50, 989, 494, 67, 1979, 8, True,
    ),
    Profile(
        "b200", "NVIDIA B200", 10, 0, 148, 178.4, 126, 228,
        7700, 900, 50, 50, 2250, 1125, 75, 4500, 8, True,
    ),
    Profile(
        "gb200", "NVIDIA GB200", 10, 0, 152, 184.3, 126, 228,
        8000, 900, 50, 225, 2500, 1250, 80, 5000, 72, True,
    ),
)  # fmt: skip


def c_source() -> str:
    """Return the profiles as a C++ array, for `machine.cpp`."""

    def literal(value: object) -> str:
        return f'"{value}"' if isinstance(value, str) else str(value).lower()

    rows = ("{" + ", ".join(map(literal, astuple(profile))) + "}" for profile in PROFILES)
    body = ",\n    ".join(rows)
    return f"static const virtual_gpu::Profile kProfiles[] = {{\n    {body},\n}};\n"
