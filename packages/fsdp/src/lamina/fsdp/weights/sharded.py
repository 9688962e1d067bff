"""Weights of a unit that are kept as shards, gathered into their storage before compute."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from lamina.buffers import FlatBuffer, StoragePool
from lamina.collectives import Handle, all_gather_into
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
        self._pool = pool
        self._key = key
        self._full = pool.register(key, local.layout.size, local.data.dtype)
        self._saved_epoch: int | None = None
        self.stays = False
        """Never take another place than the present one, whoever has to make room."""
        self._group: weakref.ref[ParameterGroup] | None = None

    @property
    def full(self) -> torch.Tensor:
        """The whole weights' flat tensor; released, its storage has no bytes."""
        return self._full

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weights."""
        return self.local.layout.size * self.local.dtype.itemsize

    @property
    def key(self) -> Hashable:
        """This group's name in the pool."""
        return self._key

    def belongs_to(self, group: ParameterGroup) -> None:
        """Say whose parameters are views of the storage, so that they can follow it."""
        self._group = weakref.ref(group)

    def remember_place(self) -> None:
        """Autograd saves views of the storage: until `forget_place` it has to come back there."""
        self._saved_epoch = self._pool.epoch(self._key)

    @property
    def place(self) -> int:
        """Number of the place that the storage has now; one that it left is never had again."""
        return self._pool.epoch(self._key)

    def forget_place(self) -> None:
        """No graph holds views of the storage any more."""
        self._saved_epoch = None

    @contextmanager
    def moving(self) -> Iterator[None]:
        """For the time being, take another place where the own one is taken."""
        before, self.stays = self.stays, False
        try:
            yield
        finally:
            self.stays = before

    @property
    def _epoch(self) -> int | None:
        """The place to come back to, where it has to be that one."""
        if self._saved_epoch is None and self.stays:
            return self._pool.epoch(self._key)
        return self._saved_epoch

    def follow(self) -> None:
        """Make the parameters views of the storage where it is now, if it has moved."""
        moved = self._pool.tensor(self._key)
        group = self._group() if self._group is not None else None
        if moved is self._full or group is None:
            return
        self._full = moved
        for parameter, view in zip(
            group.compute_parameters,
            self._pool.views(self._key, self.local.layout).values(),
            strict=True,
        ):
            parameter.data = view

    def _gather(self) -> Handle | None:
        """Bring the whole weights in.

        Raises:
            StaleStorageError: the place that autograd knows is taken by another live unit.
        """
        self._pool.acquire(self._key, epoch=self._epoch)
        self.follow()
        # Autograd saved views of this storage in forward. The gather brings the same values back,
        # which a shared version counter would take for an overwrite: the destination has its own.
        return all_gather_into(
            self._pool.destination(self._key),
            self.local.data,
            self.axes.inner.sibling("gather"),
            async_op=True,
        )

    def _invalidate(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the whole weights' storage back to the pool."""
        if self.state is WeightsState.RELEASED:
            return
        self.wait()
        self._pool.release(self._key)
        self.state = WeightsState.RELEASED
