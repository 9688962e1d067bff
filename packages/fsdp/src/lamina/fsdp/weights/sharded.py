"""Weights of a unit that are kept as shards, gathered into their storage before compute."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from lamina.buffers import FlatBuffer, StaleStorageError, StoragePool
from lamina.collectives import Handle, all_gather_into
from lamina.ddp.engine import (
    COMING,
    LIVE,
    DataParallelAxes,
    ParameterRef,
    Weights,
    tensors_in,
)
from lamina.fsdp.settings.precision import WeightCodec


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

    Note [When whole weights are given back]
    A unit is gathered when it is about to compute, or one unit ahead of that (`Prefetcher`). It is
    given back by `Unit.reshard`, which the engine calls at four times:
    - after its forward, unless its backward comes first of all, it is the root, or a user has said
      `reshard_after_forward=False` (`Engine.after_forward`);
    - at the end of the model's forward, if it was gathered ahead and not called, or without
      gradients (`Engine._end_forward`);
    - when its gradients are complete (`Engine.after_backward`), and at the end of the backward for
      what autograd never came back to (`Engine.backward_is_over`);
    - where the model is put at rest: before its state is saved, loaded or copied
      (`Engine.put_at_rest`).
    So a plain step gathers a unit twice, for its forward and its backward, and the last unit and
    the root once. What makes it more is in docs/how-to/profile.md.

    `local` is cut along the inner one of the data-parallel `axes`, and `key` names this group in
    the pool. The compute `dtype` is that of `local` by default.
    """

    are_given_back = True

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
        self.epoch = 0
        """How often the storage has moved. Views of the weights are of one epoch, and an epoch that
        is over never comes back."""
        self._fixed = False
        self._pool = pool
        # Some parameter of the group: storage has no names, and its message cannot change later.
        some = f"{local.layout.specs[0].name}, or another weight of its group,"
        self.full = pool.register(key, local.layout.size, dtype, released=_released(some))
        self._destination: torch.Tensor | None = None
        self._saved_epoch: int | None = None
        self._parameters: list[nn.Parameter] = []
        self._named: list[nn.Parameter] = []
        self._released_class: type[nn.Parameter] = nn.Parameter

    def belongs_to(self, refs: Sequence[ParameterRef]) -> None:
        """Say whose parameters are views of the storage, so that they can follow it (again)."""
        super().belongs_to(refs)
        self._parameters = [ref.parameter for ref in refs]
        names = {id(ref.parameter): ref.name for ref in refs}
        # A user's own class of parameters stays: its storage refuses all the same.
        self._named = [
            p for p in self._parameters if type(p) is nn.Parameter or isinstance(p, _Released)
        ]
        self._released_class = type("ReleasedParameter", (_Released,), {"names": names})
        if self.state not in LIVE:
            for parameter in self._named:
                parameter.__class__ = self._released_class

    def wait(self) -> None:
        """Wait for the gather: from then on the parameters can be read."""
        if self.state in COMING:
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

        StaleStorageError says that another live unit has the storage that autograd knows.
        """
        # Views that autograd or a graph of CUDA holds are right in one storage alone.
        wanted = self.epoch if self._fixed else self._saved_epoch
        if self._pool.acquire(self.key, epoch=wanted) is not self.full:
            self.follow()
        # Not `full`, of which autograd has saved views: a write there would count as a change.
        if self._destination is None:
            self._destination = self._pool.destination(self.key)
        return self._destination

    def follow(self, *, fixed: bool | None = None) -> None:
        """Make the parameters views of the storage where it is now, if it has moved.

        With `fixed` it never moves from now on, whoever has to make room; None leaves that as it
        is.
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
        # In another dtype: cast to where the gather reads it, see Note [Gathers cast main weights].
        if own.dtype != whole.dtype:
            own = whole[slice(*self.local.range)].copy_(own)
        return self._gather_over_inner(whole, own)

    def _invalidate(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the whole weights' storage back to the pool."""
        if self.state not in LIVE:
            return
        self._leave()  # first of all: a gather that is under way would write into memory that goes
        self._pool.release(self.key)
        for parameter in self._named:
            parameter.__class__ = self._released_class


class _Released(nn.Parameter):
    """The class of a parameter while its whole is released: it names itself when it is read.

    The storage refuses reads through any tensor (Note [Storage that refuses access] in
    `lamina.buffers.storage_access`), but before torch 2.14 its error has no name in a build without
    CUDA, and a slot that holds another unit's weights by now is readable.
    """

    names: ClassVar[dict[int, str]]
    """Of the parameters of a group, by `id`."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # All attributes are read by one function (`__get__`), and some of them are the memory.
        view = func.__name__ == "__get__" and func.__self__.__name__ in _VIEWS
        if view or func.__name__ not in _DESCRIBING:
            for tensor in tensors_in((args, kwargs)):
                if isinstance(tensor, _Released):
                    raise StaleStorageError(_released(tensor.names[id(tensor)]))
        call: Any = super().__torch_function__
        return call(func, types, args, kwargs or {})


_VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}
"""Attributes through which a tensor's memory can be read."""
_DESCRIBING = frozenset(
    """
    __get__ __set__ __hash__ __len__ size dim ndimension numel nelement stride storage_offset
    element_size is_contiguous is_floating_point is_complex requires_grad_ register_hook
    register_post_accumulate_grad_hook untyped_storage view_as expand_as
    """.split()
)
"""What may be asked of a released parameter, as it reads no memory: autograd finds the node of a
leaf through a view (`view_as`, `expand_as`)."""


def _released(what: str) -> str:
    return (
        f"{what} was read or written while its unit's whole weights are released (strategy 3): use "
        "it in the forward of its own module or inside model.unsharded(), and between steps the "
        "parameter that the module holds then"
    )


class EncodedWeights(ShardedWeights):
    """Sharded weights that are kept for gathering, and gathered, as codes.

    A codec turns a flat run of weights into numbers of another dtype with a little side data (a
    scale) per block of elements. This rank's shard is encoded once after each optimizer step.
    Gathers move codes and side data, and the whole unit is decoded into the storage that its
    parameters are views of. Main weights stay what the optimizer updates, so nothing is lost.
    ValueError says that shards or tensors could be cut within a block.
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
        size, device = local.data.numel(), local.device
        self._codes = torch.empty(size, dtype=codec.dtype, device=device)
        self._side = torch.empty(size // codec.block, dtype=codec.side_dtype, device=device)
        # Codes and side data of the whole unit, and what waits for the latter.
        self._arriving: tuple[torch.Tensor, torch.Tensor, Handle] | None = None
        self._encode()

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of codes and side data."""
        return (self._codes.nbytes + self._side.nbytes) * self.axes.inner.size

    @torch.no_grad()
    def _encode(self) -> None:
        blocks = (-1, self._codec.block)
        weights = self.local.data.to(self.full.dtype).view(blocks)
        self._codec.encode(weights, self._codes.view(blocks), self._side)

    def _install(self) -> None:
        super()._install()
        self._encode()

    def _gather(self) -> Handle | None:
        self.acquire()
        size, group = self.local.layout.size, self.axes.inner.sibling("gather")
        codes = self._codes.new_empty(size)
        side = self._side.new_empty(size // self._codec.block)
        # Codes first, on every rank: both travel over one communicator.
        handle = all_gather_into(codes, self._codes, group, async_op=True)
        sides = all_gather_into(side, self._side, group, async_op=True)
        self._arriving = (codes, side, sides)
        return handle

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for codes and side data, and decode them where the parameters are."""
        super().wait()
        if self._arriving is not None:  # none, if nobody has begun a gather since
            codes, side, handle = self._arriving
            handle.wait()
            blocks = (-1, self._codec.block)
            self._codec.decode(codes.view(blocks), side, self.acquire().view(blocks))
            self._arriving = None
