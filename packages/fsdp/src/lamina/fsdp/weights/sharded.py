"""Weights of a unit that are kept as shards, gathered into their storage before compute."""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from lamina.buffers import FlatBuffer, StaleStorageError, StoragePool
from lamina.collectives import Handle
from lamina.ddp.engine import (
    DataParallelAxes,
    ParameterGroup,
    Weights,
    WeightsState,
    tensors_in,
)

__all__ = ["ShardedWeights"]


class ShardedWeights(Weights):
    """A rank keeps its shard; the whole lives in the pool's storage while a unit computes.

    The parameters are views of that storage: the gather writes where the compute reads, and what
    autograd saved of them is right again once the unit has been gathered for its backward.

    Note [Gathers cast main weights]
    A shard in the compute dtype beside the main weights takes 2 bytes per parameter, and is read by
    gathers alone. So where main weights of another dtype are cut as the model weights are, a rank
    keeps only them. A gather casts them to this rank's place in the whole, and gathers in place:
    the bits are those of a cast after each step. See
    docs/decisions/0521-gathers-cast-main-weights.md.

    Args:
        local: the shard (cut along the inner axis), in the compute dtype or that of main weights.
        axes: data-parallel axes.
        pool: where the whole weights' storage comes from.
        key: this group's name in the pool.
        dtype: the compute dtype; None is that of `local`.
    """

    def __init__(
        self,
        local: FlatBuffer,
        axes: DataParallelAxes,
        pool: StoragePool,
        key: Hashable,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(local, axes)
        self.key = key
        dtype = dtype or local.dtype
        self.nbytes = local.layout.size * dtype.itemsize
        """Bytes of the whole weights."""
        self.epoch = 0
        """How often the storage has moved. Views of the weights are of one epoch, and an epoch that
        is over never comes back."""
        self._fixed = False
        self._pool = pool
        self.full = pool.register(
            key, local.layout.size, dtype, released=_released(local.layout.title)
        )
        self._destination: torch.Tensor | None = None
        self._saved_epoch: int | None = None
        self._parameters: list[nn.Parameter] = []
        self._named: list[nn.Parameter] = []
        self._released_class: type[nn.Parameter] = nn.Parameter

    def belongs_to(self, group: ParameterGroup) -> None:
        """Say whose parameters are views of the storage, so that they can follow it (again)."""
        self._parameters = group.compute_parameters
        names = {id(ref.parameter): ref.name for ref in group.refs}
        # A user's own class of parameters stays: its storage refuses all the same.
        self._named = [
            p for p in self._parameters if type(p) is nn.Parameter or isinstance(p, _Released)
        ]
        self._released_class = type("ReleasedParameter", (_Released,), {"names": names})
        if self.state is WeightsState.RELEASED:
            for parameter in self._named:
                parameter.__class__ = self._released_class

    def wait(self) -> None:
        """Wait for the gather: from then on the parameters can be read."""
        if self.state is WeightsState.GATHERING:
            super().wait()
            for parameter in self._named:
                parameter.__class__ = nn.Parameter

    def save_epoch(self) -> None:
        """Autograd saves views now: until `forget_epoch` the storage has to be this one."""
        self._saved_epoch = self.epoch

    def forget_epoch(self) -> None:
        """No graph holds views of the storage any more."""
        self._saved_epoch = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """For the time being, move where the own storage is taken."""
        before, self._fixed = self._fixed, False
        try:
            yield
        finally:
            self._fixed = before

    def acquire(self) -> torch.Tensor:
        """Take storage for the whole weights, where the parameters' views are: write there.

        Raises:
            StaleStorageError: the storage that autograd knows is taken by another live unit.
        """
        wanted = self.epoch if self._fixed else self._saved_epoch
        if self._pool.acquire(self.key, epoch=wanted) is not self.full:
            self.follow()
        if self._destination is None:
            self._destination = self._pool.destination(self.key)
        return self._destination

    def follow(self, *, fixed: bool | None = None) -> None:
        """Make the parameters views of the storage where it is now, if it has moved.

        Args:
            fixed: whether it never moves from now on, whoever has to make room; None leaves that.
        """
        self._fixed = self._fixed if fixed is None else fixed
        moved = self._pool.tensor(self.key)
        if moved is self.full or not self._parameters:
            return
        self.full, self._destination = moved, None
        self.epoch = self._pool.epoch(self.key)
        views = self._pool.views(self.key, self.local.layout)
        for parameter, view in zip(self._parameters, views.values(), strict=True):
            parameter.data = view

    def _gather(self) -> Handle | None:
        whole, own = self.acquire(), self.local.data
        if own.dtype != whole.dtype:
            own = whole[slice(*self.local.range)].copy_(own)
        return self._gather_over_inner(whole, own)

    def _invalidate(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the whole weights' storage back to the pool."""
        if self.state is WeightsState.RELEASED:
            return
        self.wait()
        self._pool.release(self.key)
        for parameter in self._named:
            parameter.__class__ = self._released_class
        self.state = WeightsState.RELEASED


class _Released(nn.Parameter):
    """The class of a parameter while its whole is released: it names itself when it is read.

    The storage refuses reads through any tensor (Note [Storage that refuses access] in
    `lamina.buffers.compat`), but in a build of torch without CUDA its error has no name, and a slot
    that holds another unit's weights by now is readable.
    """

    names: ClassVar[dict[int, str]]
    """Of the parameters of a group, by `id`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = func.__name__
        view = known == "__get__" and func.__self__.__name__ in _VIEWS
        if view or known not in _DESCRIBING:
            for one in tensors_in((args, kwargs)):
                if isinstance(one, _Released):
                    raise StaleStorageError(_released(one.names[id(one)]))
        call: Any = super().__torch_function__
        return call(func, types, args, kwargs or {})


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes through which a tensor's memory can be read."""
_DESCRIBING = {
    *(
        "__get__",
        "__set__",
        "__hash__",
        "__len__",
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
    ),
    *("stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point"),
    *("is_complex", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    *("untyped_storage", "view_as", "expand_as"),  # autograd finds a leaf's node through a view
}
"""What may be asked of a released parameter: nothing of it reads memory."""


def _released(what: str) -> str:
    return (
        f"{what} was read or written while its unit's whole weights are released (strategy 3): use "
        "it in the forward of its own module or inside model.unsharded(), and between steps the "
        "parameter that the module holds then"
    )
