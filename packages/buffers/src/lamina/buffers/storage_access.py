"""Storages that refuse access: whoever reads released memory gets an error, and not a crash.

Note [Storage that refuses access]
A read of memory that was given back ends the process: with a segmentation fault on a CPU, with an
error of the device that nothing survives on a GPU. The tensors that reach it (a parameter, its
`.data`, a view, what autograd saved) have nothing in common but their storage. So the storage has
to refuse, and torch's StorageImpl has a flag that makes each access to its memory raise.
From torch 2.14 on Python can set and clear that flag, together with the message of the error; in
torch 2.13 it can in builds with CUDA, and earlier these can set it and not clear it. Where Python
can't, nothing official keeps a read from crashing. There this module sets the flag where it lies in
the object: next to the one that refuses writes, which Python can set in every build. `_find_flags`
finds the place by setting that one on a storage of its own, and tries the result. If such a
torch keeps its flags elsewhere, nothing is refused. `_find_flags` goes once torch 2.14
is the oldest that Lamina runs on.
See docs/decisions/0414-released-storage-refuses-access.md.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache

import torch

from lamina.buffers.compat import allow_access, refuse_access, refuse_writes

__all__ = ["access_switch"]


def access_switch(storage: torch.UntypedStorage, why: str) -> Callable[[bool], object]:
    """Return a function: called with True, any access to the memory is a RuntimeError.

    Called with False, all is as before. Sizes, shapes and dtypes can be asked for at any time. The
    function refers to the storage's object, and must not be called once it is gone.

    Args:
        storage: whose memory.
        why: the error's message; torch 2.13 and earlier without CUDA have one of their own.

    While torch's CUDA sanitizer runs, nothing is refused: it asks every tensor that an operator
    names for its address, also where the operator makes a view and reads nothing.
    """
    sanitizer = getattr(sys.modules.get("torch.cuda._sanitizer"), "cuda_sanitizer", None)
    if sanitizer is not None and sanitizer.enabled:
        return bool
    place = storage._cdata
    if refuse_access is not None and allow_access is not None:
        refuse, allow = refuse_access, allow_access
        return lambda refused: refuse(place, why) if refused else allow(place)
    flags = [ctypes.c_bool.from_address(place + offset) for offset in _find_flags()]

    def switch(refused: bool) -> None:
        for flag in flags:
            flag.value = refused

    if flags and refuse_access is not None:  # builds of torch 2.11 and 2.12 with CUDA
        refuse_access(place, why)
        switch(False)
    return switch


# -- the flags where they lie, for torch before 2.14 without CUDA ---------------------------------


@cache
def _find_flags() -> tuple[int, ...]:
    """Where in a StorageImpl the flags are that refuse access: offsets in bytes; () if unknown."""
    probe, tried = torch.ones(2, device="cpu"), torch.ones(2, device="cpu")
    before = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    refuse_writes(probe)
    after = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    changed = [offset for offset in range(95) if before[offset] != after[offset]]
    # Two flags went from 0 to 1: the one that says that there is anything to check at all, and the
    # one that refuses writes. The one that refuses reads as well comes right after it.
    if [before[offset] + after[offset] for offset in changed] != [1, 1]:
        return ()
    any_check, reads = changed[0], changed[1] + 1
    if before[reads]:
        return ()
    flags = [
        ctypes.c_bool.from_address(tried.untyped_storage()._cdata + offset)
        for offset in (any_check, reads)
    ]
    for flag in flags:
        flag.value = True
    try:
        tried.sum()
    except RuntimeError:
        return any_check, reads
    finally:
        for flag in flags:
            flag.value = False
    return ()
