"""Weights of a unit that are kept as shards, gathered into their storage before compute."""

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from lamina.buffers import FlatBuffer, StoragePool
from lamina.collectives import Handle
from lamina.ddp.engine import DataParallelAxes, ParameterGroup, Weights, WeightsState

__all__ = ["ShardedWeights"]


class ShardedWeights(Weights):
    """A rank keeps its shard; the whole lives in the pool's storage while a unit computes.

    The parameters are views of that storage: the gather writes where the compute reads, and what
    autograd saved of them is right again once the unit has been gathered for its backward.

    Args:
        local: the shard (cut along the inner axis), in the compute dtype.
        axes: data-parallel axes.
        pool: where the whole weights' storage comes from.
        key: this group's name in the pool.
    """

    def __init__(
        self, local: FlatBuffer, axes: DataParallelAxes, pool: StoragePool, key: Hashable
    ) -> None:
        super().__init__(local, axes)
        self.key = key
        self.nbytes = local.layout.size * local.dtype.itemsize
        """Bytes of the whole weights."""
        self.epoch = 0
        """How often the storage has moved. Views of the weights are of one epoch, and an epoch that
        is over never comes back."""
        self._fixed = False
        self._pool = pool
        self._full = pool.register(key, local.layout.size, local.data.dtype)
        self._destination: torch.Tensor | None = None
        self._saved_epoch: int | None = None
        self._group: weakref.ref[ParameterGroup] | None = None

    @property
    def full(self) -> torch.Tensor:
        """The whole weights' flat tensor; released, its storage has no bytes."""
        return self._full

    def belongs_to(self, group: ParameterGroup) -> None:
        """Say whose parameters are views of the storage, so that they can follow it."""
        self._group = weakref.ref(group)

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
        if self._pool.acquire(self.key, epoch=wanted) is not self._full:
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
        group = self._group() if self._group is not None else None
        if moved is self._full or group is None:
            return
        self._full, self._destination = moved, None
        self.epoch = self._pool.epoch(self.key)
        for parameter, view in zip(
            group.compute_parameters,
            self._pool.views(self.key, self.local.layout).values(),
            strict=True,
        ):
            parameter.data = view

    def _gather(self) -> Handle | None:
        return self._gather_over_inner(self.acquire(), self.local.data)

    def _invalidate(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the whole weights' storage back to the pool."""
        if self.state is WeightsState.RELEASED:
            return
        self.wait()
        self._pool.release(self.key)
        self.state = WeightsState.RELEASED
