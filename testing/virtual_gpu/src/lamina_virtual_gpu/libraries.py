"""The libraries of NVIDIA that a CUDA build of torch wants, and how each is stood in for.

Entries that a source in `stand_ins/` defines are modelled. All others that torch's libraries name
are generated: a call says the entry's name on stderr and returns an error. Those of `QUIET` say
nothing and return success, as nothing depends on what they would do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Library:
    """A shared library to build.

    Args:
        name: its soname, without `.so` and version.
        version: the number after `.so.`.
        sources: files of `stand_ins/`, without `.cpp`.
        refusal: the status that a generated entry returns: the library's own "not supported".
        node: the version of its symbols; "own" is its file name, "" is none.
        names: which symbols without a version are its own.
    """

    name: str
    version: int
    sources: tuple[str, ...] = ()
    refusal: int = 1
    node: str = "own"
    names: str = "$"

    @property
    def file(self) -> str:
        """Return the file's name, which is its soname."""
        return f"{self.name}.so.{self.version}"

    @property
    def symbol_version(self) -> str:
        """Return the version of its symbols, or nothing."""
        return self.file if self.node == "own" else self.node

    def wants(self, symbol: str, version: str) -> bool:
        """Whether a symbol that torch does not define is this library's."""
        if self.symbol_version:
            return version == self.symbol_version
        return not version and re.match(self.names, symbol) is not None


RUNTIME = (
    "machine", "times", "devices", "memory", "streams", "queues", "races", "signals",
    "durations", "launches",
)  # fmt: skip
# The runtime is the first: all others are linked with it.
LIBRARIES = (
    Library("libcudart", 13, RUNTIME, 801),
    Library("libcublas", 13, ("cublas",), 15),
    Library("libcublasLt", 13, ("cublas_lt",), 15),
    Library("libcudnn", 9, ("cudnn",), 3000),
    Library("libnccl", 2, ("nccl", "nccl_peers", "nccl_numbers"), 5, "", "nccl[A-Z]"),
    Library("libnvrtc", 13, ("nvrtc",), 11),
    Library("libcusparse", 12, (), 10),
    Library("libcufft", 12, (), 16),
    Library("libcufile", 0, (), 5001, "", "cuFile"),
    Library("libcusparseLt", 0, (), 10, "", "cusparseLt"),
    Library("libcurand", 10, (), 203),
    Library("libcusolver", 12, (), 9),
    Library("libnvshmem_host", 3, (), 7, "NVSHMEM", "nvshmem"),
    Library("libcupti", 13, (), 27),
    Library("libnvidia-ml", 1, ("nvml",), 3, "", "nvml"),
    # The driver's entries are in the runtime: this is an empty shell that needs it.
    Library("libcuda", 1, node=""),
)

# Torch's profiler subscribes to CUPTI wherever there is a GPU; it then gets no records. torch 2.15
# makes a handle of cuSOLVER with others; what takes the handle refuses.
QUIET = frozenset(
    """
    cuptiActivityDisable cuptiActivityEnable cuptiActivityEnableCudaEventDeviceTimestamps
    cuptiActivityEnableDriverApi cuptiActivityEnableRuntimeApi cuptiActivityFlushAll
    cuptiActivityRegisterCallbacks cuptiActivityRegisterTimestampCallback cuptiActivitySetAttribute
    cuptiActivityPopExternalCorrelationId cuptiActivityPushExternalCorrelationId
    cuptiEnableCallback cuptiEnableDomain cuptiFinalize cuptiSubscribe cuptiUnsubscribe
    cudnnSetStream cusolverDnCreate cusolverDnDestroy nvshmem_init
    """.split()
)
