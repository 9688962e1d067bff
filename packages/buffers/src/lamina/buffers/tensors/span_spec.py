"""The place of a span in its tensor, and the interface to the ranks that hold the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, TypeAlias

import torch

from lamina.buffers.resolve_axes import Axis

__all__ = ["Extents", "ReduceOp", "SpanCommunicator", "SpanSpec"]

ReduceOp: TypeAlias = Literal["sum", "max", "min"]
Extents: TypeAlias = Callable[[], Sequence[tuple[int, int]]]


class SpanCommunicator(Protocol):
    """What a `ShardedTensor` needs of the layers above, since buffers never communicates.

    It spans the ranks of the product of the tensor's shard axes, in the order of the axes, outer
    axis slowest. Both methods are collective and synchronous (stream-correct on CUDA).
    """

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
        """Reduce a small plain tensor over the ranks (fp64 and int64 exactly as such).

        May work in place; the caller uses the returned tensor.
        """

    def all_gather(self, local: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
        """Concatenate the ranks' flat tensors, of `numels[rank]` elements, in rank order."""


@dataclass(frozen=True)
class SpanSpec:
    """Place of a span in its tensor.

    Attributes:
        shape: global shape.
        start, stop: this rank's elements of the flattened tensor.
        axes: the axes that cut it, outer first; () where every rank holds the whole.
        communicator: reaches the other ranks; None where none was given.
        extents: lazily, `(start, stop)` of every rank in the communicator's order.
    """

    shape: torch.Size
    start: int
    stop: int
    axes: tuple[Axis, ...] = ()
    communicator: SpanCommunicator | None = None
    extents: Extents | None = field(default=None, repr=False, compare=False)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the whole in row-major order."""
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= max(size, 1)
        return tuple(reversed(strides))

    @property
    def local_numel(self) -> int:
        """Elements held here."""
        return self.stop - self.start

    @cached_property
    def ranks(self) -> int:
        """Ranks that the tensor is cut over."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def is_cut(self) -> bool:
        """Whether other ranks may hold elements that this one doesn't."""
        return self.ranks > 1

    def matches(self, other: SpanSpec) -> bool:
        """Whether elements at the same place of both spans are the same element of the whole."""
        return self is other or (
            self.shape == other.shape
            and self.start == other.start
            and self.stop == other.stop
            and self.ranks == other.ranks
        )

    def __deepcopy__(self, memo: dict[int, object]) -> SpanSpec:
        # Nothing here changes, and a communicator has no copy: copied tensors reach the same ranks.
        return self

    def where(self) -> str:
        """This rank's coordinates, for messages."""
        places = ", ".join(f"{axis.name}={axis.rank}/{axis.size}" for axis in self.axes)
        return places or "whole on every rank"

    def reach(self, operation: str) -> SpanCommunicator:
        """The communicator, or an error that says what to call instead.

        Raises:
            RuntimeError: the tensor is cut and has no communicator.
        """
        if self.communicator is None:
            raise RuntimeError(
                f"{operation} of a ShardedTensor of shape {list(self.shape)} ({self.where()}) "
                "needs the other ranks' spans, and it was made without a communicator: pass "
                "communicator=SpanGroups(...), from lamina.collectives.engine, to the FlatBuffer "
                "or ShardedTensor, use .to_local() for this rank's span, or lamina.ddp's "
                "full_parameters, full_gradients and clip_grad_norm"
            )
        return self.communicator
