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
from functools import cache, partial
from typing import NamedTuple

import torch

from lamina.buffers.compat import allow_access, refuse_access, refuse_writes


class Access(NamedTuple):
    """Makes a storage refuse access, and allow it again.

    After `refuse()` any access to the memory is a RuntimeError. Sizes, shapes and dtypes can be
    asked for at any time. Neither may be called once the storage's object is gone.
    """

    refuse: Callable[[], object]
    allow: Callable[[], object]


def access_of(storage: torch.UntypedStorage, why: str) -> Access:
    """The switch of a storage that allows access; `why` is the message of errors that it makes.

    torch 2.13 and earlier without CUDA have a message of their own. While torch's CUDA sanitizer
    runs, nothing is refused: it asks every tensor that an operator names for its address, also
    where the operator makes a view and reads nothing.
    """
    sanitizer = getattr(sys.modules.get("torch.cuda._sanitizer"), "cuda_sanitizer", None)
    if sanitizer is not None and sanitizer.enabled:
        return Access(bool, bool)
    place = storage._cdata
    if refuse_access is not None and allow_access is not None:
        return Access(partial(refuse_access, place, why), partial(allow_access, place))
    if (flags := _find_flags()) is None:
        return Access(bool, bool)
    if refuse_access is not None:  # builds of torch 2.11 and 2.12 with CUDA: for the message
        refuse_access(place, why)
        ctypes.memset(place + flags, 0, 3)
    return Access(*(partial(ctypes.memset, place + flags, value, 3) for value in (1, 0)))


# -- the flags where they lie, for torch before 2.14 without CUDA ---------------------------------


@cache
def _find_flags() -> int | None:
    """Where in a StorageImpl three flags in a row are that refuse access: an offset in bytes.

    The first says that there is anything to check at all, the second refuses writes, and the third
    refuses reads as well. None where they are not found.
    """
    # Neither makes an operator: a mode that is on (a recorder's, that of fake tensors) must not see
    # or replace them, since the answer is kept for all of the process.
    probe, tried = (torch.frombuffer(bytearray(8), dtype=torch.uint8) for _ in range(2))
    before = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    refuse_writes(probe)  # sets the first two
    after = ctypes.string_at(probe.untyped_storage()._cdata, 96)
    changed = [offset for offset in range(96) if before[offset] != after[offset]]
    flags = changed[0] if changed else 0
    if before[flags : flags + 3] != bytes(3) or after[flags : flags + 3] != bytes((1, 1, 0)):
        return None
    place = tried.untyped_storage()._cdata + flags
    ctypes.memset(place, 1, 3)
    try:
        tried.data_ptr()
    except RuntimeError:
        return flags
    finally:
        ctypes.memset(place, 0, 3)
    return None
