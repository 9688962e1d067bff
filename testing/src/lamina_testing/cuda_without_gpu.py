"""Fake tensors of a CUDA device, forward and backward, in a build of torch for CPUs.

Under `FakeTensorMode` torch refuses a product of tensors on two devices, as a GPU does. So modules
that run on fake CUDA tensors show a tensor that was made on the wrong device, an operator that CUDA
does not have in these dtypes, and strides and shapes that its `meta` kernel refuses. Nothing is
computed, so values, and the order of streams, are not seen.

A process that has called `pretend_cuda()` is of no other use: run it as one of its own.
"""

import ctypes
import importlib.util
import shutil
import subprocess
from pathlib import Path

_LIBRARIES = ("libc10.so", "libtorch_cpu.so")


def what_lacks() -> str | None:
    """Say why `build()` cannot be used here, or None; imports torch."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return "this build of torch has a device guard of its own"
    return None if shutil.which("g++") else "there is no g++"


def build(directory: Path) -> Path:
    """Compile the answers of a CUDA device into a library in `directory` (some 10 s)."""
    library, torch = directory / "cuda_without_gpu.so", _torch()
    source = Path(__file__).with_suffix(".cpp")
    headers = torch / "include"
    subprocess.run(
        ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", str(source), f"-I{headers}", "-o",
         str(library), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"],
        check=True,
    )  # fmt: skip
    return library


def pretend_cuda(library: Path) -> None:
    """Register the answers; before this process imports torch, which asks only once."""
    for name in _LIBRARIES:
        ctypes.CDLL(str(_torch() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library))


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ImportError("torch is not installed")
    return Path(found.origin).parent
