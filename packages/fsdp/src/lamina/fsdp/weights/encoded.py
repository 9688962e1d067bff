"""Room for quantised weights: what ranks keep and send is encoded, what computes is decoded.

A codec turns a flat run of weights into numbers of another dtype with a little side data (a scale)
per block of elements. This rank's shard is encoded once after each optimizer step; gathers move
codes and side data, and the whole unit is decoded into the storage that its parameters are views
of. Main weights stay what the optimizer updates, so nothing is lost from step to step.
"""

from collections.abc import Hashable

import torch

from lamina.buffers import FlatBuffer, StoragePool
from lamina.collectives import Handle, all_gather_into
from lamina.ddp.engine import DataParallelAxes, WeightsState
from lamina.fsdp.settings.precision import WeightCodec
from lamina.fsdp.weights.sharded import ShardedWeights

__all__ = ["EncodedWeights"]


class EncodedWeights(ShardedWeights):
    """Sharded weights that are kept for gathering, and gathered, as codes.

    Args:
        local: the shard, that of the main weights where these are cut alike.
        axes: data-parallel axes.
        pool: where the whole weights' storage comes from.
        key: this group's name in the pool.
        dtype: the compute dtype, of what is encoded.
        codec: encodes and decodes.

    Raises:
        ValueError: if shards or tensors could be cut within a block.
    """

    def __init__(
        self,
        local: FlatBuffer,
        axes: DataParallelAxes,
        pool: StoragePool,
        key: Hashable,
        dtype: torch.dtype,
        codec: WeightCodec,
    ) -> None:
        super().__init__(local, axes, pool, key, dtype)
        starts = local.layout.offsets
        if any(place % codec.block for place in (local.layout.shard_size, *starts)):
            raise ValueError(
                f"{type(codec).__name__}.block={codec.block} does not divide the places at which "
                f"tensors start and shards are cut (shards of {local.layout.shard_size} elements): "
                "use a divisor of 128"
            )
        self._codec = codec
        held, device = local.data.numel(), local.device
        self._codes = torch.empty(held, dtype=codec.dtype, device=device)
        self._side = torch.empty(held // codec.block, dtype=codec.side_dtype, device=device)
        self._gathered: tuple[torch.Tensor, torch.Tensor] | None = None
        self._side_handle: Handle | None = None
        self._encode()

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of codes and side data."""
        return (self._codes.nbytes + self._side.nbytes) * self.axes.inner.size

    def _encode(self) -> None:
        with torch.no_grad():
            weights = self.local.data.to(self.full.dtype)
            blocks = (-1, self._codec.block)
            self._codec.encode(weights.view(blocks), self._codes.view(blocks), self._side)

    def _install(self) -> None:
        super()._install()
        self._encode()

    def _gather(self) -> Handle | None:
        self.acquire()
        size, group = self.local.layout.size, self.axes.inner.sibling("gather")
        codes = self._codes.new_empty(size)
        side = self._side.new_empty(size // self._codec.block)
        self._gathered = (codes, side)
        handle = all_gather_into(codes, self._codes, group, async_op=True)
        self._side_handle = all_gather_into(side, self._side, group, async_op=True)
        return handle

    def wait(self) -> None:
        """Wait for codes and side data, and decode them where the parameters are."""
        if self.state is not WeightsState.GATHERING:
            return
        super().wait()
        if self._side_handle is not None:
            self._side_handle.wait()
        if self._gathered is not None:
            codes, side = self._gathered
            blocks = (-1, self._codec.block)
            with torch.no_grad():
                self._codec.decode(codes.view(blocks), side, self.acquire().view(blocks))
        self._gathered = self._side_handle = None
