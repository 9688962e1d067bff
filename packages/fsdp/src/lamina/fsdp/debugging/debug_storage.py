"""`check_storage=True`: whoever reads a unit's released weights is named, where it would crash.

A Python reference to a parameter outlives the gather that the parameter was a view of. Without
this check a read of it finds memory that was given back: the process dies, or computes with another
unit's weights. With it, released storage is kept and filled with NaN, every operator of a forward
is asked what it reads, and what autograd saved of a unit is compared with what lies there when
backward comes for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lamina.buffers import StaleStorageError, StoragePool
from lamina.buffers.engine import SavedTensorGuard
from lamina.fsdp.compat import TorchDispatchMode, tree_leaves


class StorageCheck:
    """Watches over reads of weights in a pool that is NaN wherever no unit lives (`poison`)."""

    def __init__(self, pool: StoragePool) -> None:
        self._pool = pool

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Entered around a forward.

        StaleStorageError names the unit whose released weights are read, in the forward or by the
        backward of what it computed.
        """
        with SavedTensorGuard(self._pool), _Reads(self._pool):
            yield


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Asks of each operator whether it reads storage that no unit lives in."""

    def __init__(self, pool: StoragePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pool = pool

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        views = not schema.is_mutable and any(output.alias_info for output in schema.returns)
        for leaf in () if views else tree_leaves((args, kwargs)):
            # The pool itself fills released storage, as bytes, which no weights are.
            plain = type(leaf) in (torch.Tensor, torch.nn.Parameter)
            if plain and leaf.dtype is not torch.uint8:
                try:
                    self._pool.owner_of(leaf)
                except StaleStorageError as error:
                    raise StaleStorageError(f"{func} reads released weights: {error}") from error
        return func(*args, **(kwargs or {}))
