"""Keys of random numbers: what the GPU's generator stands at, as a seed for the CPU's.

An operator that draws gives the same numbers whenever the GPU's generator is in the same state. So
a checkpointed block draws its dropout again, and a run that is resumed goes on as it would have.
"""

from __future__ import annotations

import ctypes
import functools

import torch

from lamina_virtual_gpu.activate import LIBRARY_FOLDER

LIBRARY = LIBRARY_FOLDER / "liblamina_arithmetic.so"
ALL_BITS = 2**64 - 1


@functools.cache
def library() -> ctypes.CDLL:
    """The kernels of `kernels.cpp`; loading them changes nothing."""
    loaded = ctypes.CDLL(str(LIBRARY), mode=ctypes.RTLD_GLOBAL)
    loaded.vgpu_key_of.restype = ctypes.c_uint64
    loaded.vgpu_key_of.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    return loaded


def key_of(seed: int, offset: int) -> int:
    """Return the key for a state of the GPU's generator."""
    return int(library().vgpu_key_of(seed & ALL_BITS, offset & ALL_BITS))


def key_of_operator() -> int | None:
    """Return the key of the operator that this thread computes for a GPU, if it draws."""
    key = ctypes.c_uint64()
    return key.value if library().vgpu_random_key(ctypes.byref(key)) else None


def generator_of(key: int | None) -> torch.Generator:
    """Return a generator of the CPU at the beginning of a key's numbers."""
    return torch.Generator("cpu").manual_seed((key or 0) & ALL_BITS)
