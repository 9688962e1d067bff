"""Work of Python in the queue of a stream."""

from __future__ import annotations

import _thread
import ctypes
import functools
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lamina_virtual_gpu.activate import LIBRARY_FOLDER

Act = Callable[[], None]
# What is queued, by number. What a graph has captured stays, as it may run again.
_waiting: dict[int, Act] = {}
_captured: set[int] = set()
_failures: dict[int, BaseException] = {}
_callers: set[int] = set()  # work whose caller is still there, and takes its error
_numbers = itertools.count(1)


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY_FOLDER / "libcudart.so.13"))
    library.vgpu_enqueue_work.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_long,
    ]
    library.vgpu_touch.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.vgpu_on_work(_run_for_a_stream)
    return library


def _run(number: int) -> int:
    """Do a piece of work; return 0 if it failed."""
    act = _waiting[number] if number in _captured else _waiting.pop(number)
    try:
        act()
    except KeyboardInterrupt:
        # No exception goes through the stream's caller in C. The program gets it a moment later.
        threading.Timer(0.05, _thread.interrupt_main).start()
        return 1
    except BaseException as error:
        if number in _callers:
            _failures[number] = error
            return 1
        print("virtual GPU: work failed when its stream came to it:", file=sys.stderr)
        traceback.print_exception(error)
        return 0
    return 1


_run_for_a_stream = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_long)(_run)


@contextmanager
def covered() -> Iterator[None]:
    """What is launched within is computed by what the caller enqueues then."""
    _library().vgpu_cover(1)
    try:
        yield
    finally:
        _library().vgpu_cover(-1)


@functools.cache
def watches_races() -> bool:
    """Whether the device looks for races."""
    return bool(_library().vgpu_watches_races())


def touch(address: int, size: int, writes: bool) -> None:
    """Tell of bytes that the work at hand has turned out to touch."""
    _library().vgpu_touch(address, size, writes)


def spoil(address: int, size: int) -> None:
    """Tell of memory that the current stream was given: the adversary makes it NaN."""
    import torch

    stream = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    _library().vgpu_spoil(ctypes.c_void_p(stream), ctypes.c_void_p(address), ctypes.c_size_t(size))


def enqueue(name: str, act: Act) -> None:
    """Put work into the current stream of the current device.

    Raises:
        BaseException: what the work raised, if it ran at once.
    """
    import torch

    device = torch.cuda.current_device()
    stream = torch._C._cuda_getCurrentRawStream(device)
    number = next(_numbers)
    _waiting[number] = act
    if torch.cuda.is_current_stream_capturing():
        _captured.add(number)
    _callers.add(number)
    try:
        _library().vgpu_enqueue_work(stream, device, name.encode(), number)
    finally:
        _callers.discard(number)
    if number in _failures:
        raise _failures.pop(number)
