"""Counts copies and live memory from outside, by watching every operator that PyTorch runs.

`Meter` is a dispatch mode: it sees operators after autograd and composite ones have been taken
apart (`contiguous` and `reshape` arrive as `clone`, `.to` as `_to_copy`), in forward, in
backward, in optimizers and inside tensor subclasses such as DTensor.

It does not see: what happens within one operator or hand-written kernel (their temporaries and
copies); work of threads that the program starts itself; what a collective does inside its backend.
On the CPU, backward runs on the calling thread. For CUDA tensors autograd runs backward on threads
of its own, and hands them the modes of the thread that called `backward`.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

# Operators that only move (or convert) data, by name without overload. `add` and `_foreach_add`
# are the out-of-place forms: accumulating a gradient should write into the sum.
_COPIES = frozenset(
    {
        "aten::copy_",
        "aten::_foreach_copy_",
        "aten::clone",
        "aten::_to_copy",
        "aten::cat",
        "aten::stack",
        "aten::_chunk_cat",
        "aten::constant_pad_nd",
        "aten::repeat",
        "aten::add",
        "aten::_foreach_add",
        "fsdp::all_gather_copy_in",
        "fsdp::split_with_sizes_copy",
        "fsdp::chunk_cat",
        "fsdp::chunk_cat_mixed_dtype",  # torch 2.15's name of it
    }
)


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts copied bytes and live storages while it is active.

    `by_op` maps an operator's name ("copy_", "cat") to the bytes it has written, over all calls
    that wrote `min_numel` elements or more (to one tensor, or to a list of them in one call);
    `bytes_copied` is their sum. Counted are `copy_`, `clone`, `_to_copy` (every change of
    dtype, device or layout), `cat`, `stack`, `_chunk_cat`, `repeat`, `constant_pad_nd`,
    the `..._copy` forms of views, out-of-place `add` and `_foreach_add` (with `out=`, when
    it is none of the terms), the foreach forms, and the copies of torch's own FSDP2. In-place adds,
    fills and arithmetic other than addition are not copies.

    `live_storages()`, `live_bytes()` and `peak_live_bytes` cover every storage that existed
    as a Python tensor on entry or was an operator's input or output since. A storage counts once
    however many views it has, with the bytes it holds now: 0 after `resize_(0)`. The peak is
    taken after each operator that allocates, before its inputs are let go; a storage that is
    resized counts from the first operator that touches it.
    """

    def __init__(self, min_numel: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.min_numel = min_numel
        self.by_op: Counter[str] = Counter()
        self.peak_live_bytes = 0
        self._references: dict[int, StorageWeakRef] = {}
        self._sizes: dict[int, int] = {}

    @property
    def bytes_copied(self) -> int:
        """Bytes written by all counted operators."""
        return self.by_op.total()

    def reset(self) -> None:
        """Start counting anew: no copies yet, and the peak is what is live now."""
        self.by_op.clear()
        self.peak_live_bytes = self.live_bytes()

    def live_storages(self) -> dict[int, int]:
        """Return the bytes of every storage that is alive, by the address of its memory."""
        found: dict[int, int] = {}
        for key, reference in list(self._references.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._references[key], self._sizes[key]
            else:
                self._sizes[key] = storage.nbytes()
                _enter(found, storage)
        return found

    def live_bytes(self) -> int:
        """Return the sum of `live_storages`."""
        return sum(self.live_storages().values())

    def __enter__(self) -> Meter:
        _collect_garbage()
        for tensor in _python_tensors():
            self._track(tensor)
        self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then count."""
        if any(_takes_operators_apart(kind) for kind in types):
            return NotImplemented  # the subclass goes first; operators it runs come back here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._count(func, args, kwargs, result)
        news = [self._track(tensor) for tensor in _tensors((args, kwargs, result))]
        if any(news):
            self.peak_live_bytes = max(self.peak_live_bytes, self.live_bytes())
        return result

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        name = func._schema.name
        if name not in _COPIES and not (name.startswith("aten::") and name.endswith("_copy")):
            return
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            written = list(_tensors(args[0]))
        elif name == "fsdp::all_gather_copy_in":
            written = list(_tensors(result[0]))  # the shard, packed; the rest is the gather's
        else:
            written = list(_tensors(kwargs.get("out", result)))
        if name == "aten::add" and "out" in kwargs and any(kwargs["out"] is term for term in args):
            return
        written = [tensor for tensor in written if _storage(tensor) is not None]
        if sum(tensor.numel() for tensor in written) >= self.min_numel:
            size = sum(tensor.numel() * tensor.element_size() for tensor in written)
            self.by_op[name.partition("::")[2]] += size

    def _track(self, tensor: Tensor) -> bool:
        """Enter the tensor's storage; return whether it is new or has grown."""
        storage = _storage(tensor)
        if storage is None:
            return False
        key, size = storage._cdata, storage.nbytes()
        # The weak reference keeps the address of the storage object from being used again.
        if key not in self._references:
            self._references[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        elif size <= self._sizes[key]:
            return False
        self._sizes[key] = size
        return True


def live_storages() -> dict[int, int]:
    """Return the bytes of every storage that a Python tensor (or its `.grad`) refers to.

    Keys are addresses of memory; views of one storage count once. Found through the garbage
    collector: whatever code made the tensors has no say in it. Tensors that only C++ holds, such
    as those an autograd graph has saved, are not found; a `Meter` sees them.
    """
    _collect_garbage()
    found: dict[int, int] = {}
    for tensor in _python_tensors():
        storage = _storage(tensor)
        if storage is not None:
            _enter(found, storage)
    return found


def live_bytes() -> int:
    """Return the sum of `live_storages`."""
    return sum(live_storages().values())


def bytes_at_rest(seconds: float = 0.3) -> int:
    """Return `live_bytes` once threads have let go of what they no longer need.

    On a GPU they do so late: autograd's a moment after `backward()` has returned, and NCCL's, which
    looks ten times a second, after a collective has ended on the device. So there this waits until
    the number has not changed for some `seconds`.
    """
    held = live_bytes()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        since = time.monotonic()
        while time.monotonic() - since < seconds:
            time.sleep(0.05)
            if (now := live_bytes()) != held:
                held, since = now, time.monotonic()
    return held


def not_freed(watched: Iterable[weakref.ref[Any]], seconds: float = 5.0) -> list[object]:
    """Return the objects that are alive still when no thread of autograd's can hold them.

    On a GPU a backward ends on a thread of autograd's. It drops the last references a moment after
    `backward()` has returned, so what is not free at once is looked at again for some seconds.
    """
    watched, end = list(watched), time.monotonic() + seconds
    while any(each() is not None for each in watched) and time.monotonic() < end:
        time.sleep(0.01)
    return [each() for each in watched if each() is not None]


def _collect_garbage() -> None:
    """Leave none: what goes later would be taken for memory that the measured code gave back.

    Once is not enough: what autograd's graphs hold is garbage only after their tensors have gone.
    """
    for _ in range(10):
        if not gc.collect():
            return


def _python_tensors() -> Iterator[Tensor]:
    for candidate in gc.get_objects():
        # isinstance() would ask proxies for their __class__, which may run any code.
        if issubclass(type(candidate), Tensor):
            yield candidate
            if _is_leaf(candidate) and candidate.grad is not None:
                yield candidate.grad


def _is_leaf(tensor: Tensor) -> bool:
    try:
        return tensor.is_leaf
    except RuntimeError:
        # Autograd refuses to name the operation that made a view, if the function gave several
        # views and their base was written in place since. A view that has such an operation is no
        # leaf. It may be another test's, of the same process.
        return False


def _takes_operators_apart(kind: type) -> bool:
    # Fake tensors do too, but have no memory: what they run is of no interest here.
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _tensors(element)


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage, or None where there is no memory behind it (meta, fake, wrappers).

    A storage that refuses access for now (a free slot of a pool) may hold memory.
    """
    if tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return None
        storage.data_ptr()
    except RuntimeError as error:  # a wrapper's: its memory is in the tensors that it wraps
        return storage if _refuses_access(error) else None
    return storage


def _refuses_access(error: RuntimeError) -> bool:
    return any(
        words in str(error) for words in ("Storage that is invalid", "is released", "are released")
    )


def _enter(found: dict[int, int], storage: torch.UntypedStorage) -> None:
    size = storage.nbytes()
    if size:
        try:
            address = storage.data_ptr()
        except RuntimeError:
            address = storage._cdata
        found[address] = max(size, found.get(address, 0))
