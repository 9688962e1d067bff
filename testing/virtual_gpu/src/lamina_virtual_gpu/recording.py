"""What the virtual GPU has recorded, read by the program that runs on it."""

from __future__ import annotations

import ctypes
import functools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lamina_virtual_gpu.activate import LIBRARY_FOLDER


@dataclass(frozen=True)
class Record:
    """What this process has asked of its virtual GPUs since the last `reset`.

    Counts of `copies` and `collectives` come with their bytes, those of `products` and `kernels`
    with their seconds.
    """

    launches: int
    replayed_launches: int
    operations: float
    seconds_waited: float
    calls: dict[str, int] = field(repr=False)
    copies: dict[str, tuple[int, float]]
    collectives: dict[str, tuple[int, float]]
    products: dict[str, tuple[int, float]]
    host_waits: dict[str, int]
    not_modelled: list[str]
    streams: list[tuple[int, int, int, float]]
    kernels: dict[str, tuple[int, float]] = field(repr=False)


@functools.cache
def _library() -> ctypes.CDLL:
    """The stand-in for the CUDA runtime; it is loaded once in a process."""
    path = LIBRARY_FOLDER / "libcudart.so.13"
    if not path.exists():
        raise RuntimeError(
            f"{sys.executable} is in no environment with a virtual GPU: {path} is not there.\n"
            "Make one with `lamina-virtual-gpu setup FOLDER`, and use FOLDER/bin/python"
        )
    library = ctypes.CDLL(str(path))
    library.vgpu_now.restype = ctypes.c_double
    for entry in (library.vgpu_record, library.vgpu_races, library.vgpu_rates):
        entry.restype = ctypes.c_char_p
    return library


def reset() -> None:
    """Begin a new record."""
    _library().vgpu_reset()


def record() -> Record:
    """Return what has been asked of the virtual GPUs since the last `reset`."""
    return Record(**json.loads(_library().vgpu_record().decode(errors="replace")))


def tell_kernel(moved: float, fp32_operations: float = 0.0) -> None:
    """Say what this thread's next kernel costs; zeros leave it to the clock.

    Args:
        moved: bytes that it reads and writes.
        fp32_operations: additions and multiplications in fp32, outside tensor cores.
    """
    _library().vgpu_next_kernel(ctypes.c_double(moved), ctypes.c_double(fp32_operations))


def races() -> list[str]:
    """Return the races of this process's streams since the last `forget_races`.

    Each is two pieces of work that touch the same bytes and that no wait orders: what they are,
    their streams, where Python gave them, and whose memory it is. They are looked for under an
    adversary, and in every order with `VGPU_RACES=report`.
    """
    text: str = _library().vgpu_races().decode(errors="replace")
    return text.split("\1")[:-1]


def forget_races() -> None:
    """Begin anew: a test has planted what was seen so far."""
    _library().vgpu_forget_races()


def now() -> float:
    """Return the host's virtual time, seconds. It moves by fixed costs of calls and by waits.

    With `VGPU_HOST_SCALE=1` the real seconds of the host are added.
    """
    return float(_library().vgpu_now())


def now_at_rates() -> dict[str, float]:
    """Return the host's virtual time under each set of rates, seconds.

    The first set, "own", is the device's: it decides what has ended, so memory, launches and waits
    are those of that set. `VGPU_RATES` adds others, such as `"free: link=1e6 network=1e6; slow:
    kernels=0.8"`: GB/s, and how fast kernels are beside the own ones. Their times are those of the
    same work in the same order.
    """
    return _times(0, of_host=True)


def stream_ends(stream: int) -> dict[str, float]:
    """Return when the work of a stream ends under each set of rates, seconds of virtual time.

    Args:
        stream: its handle, such as `torch.cuda.current_stream().cuda_stream`.
    """
    return _times(stream, of_host=False)


def _times(stream: int, of_host: bool) -> dict[str, float]:
    names: list[str] = _library().vgpu_rates().decode().splitlines()
    times = (ctypes.c_double * len(names))()
    _library().vgpu_times(ctypes.c_void_p(stream), ctypes.c_bool(of_host), times)
    return dict(zip(names, times, strict=True))


@contextmanager
def host_waits(depth: int = 6) -> Iterator[Counter[tuple[str, ...]]]:
    """Collect each wait of the host for the device: what waited, and the Python lines that called.

    Args:
        depth: how many lines, the innermost first.
    """
    seen: Counter[tuple[str, ...]] = Counter()

    def note(what: bytes) -> None:
        lines, frame = [what.decode()], sys._getframe(1)
        while frame is not None and len(lines) <= depth:
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back  # type: ignore[assignment]
        seen[tuple(lines)] += 1

    act = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(note)
    _library().vgpu_on_host_wait(act)
    try:
        yield seen
    finally:
        _library().vgpu_on_host_wait(None)
