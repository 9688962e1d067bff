"""Tensors that hold a span: its place in the whole, and the tables of aten operations.

torch.distributed.checkpoint stores boxes (offsets and sizes). A span is a few boxes, each of them a
contiguous run of the span, so nothing is copied to write one or to read one back.

A handler takes the operation and then the operation's own arguments, with its schema's defaults:
`def _sum(func, tensor, dim=None, keepdim=False, *, dtype=None)`. torch passes the arguments that
the schema marks as keyword-only by keyword and all others by position, without trailing defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import torch

from lamina.buffers.compat import OpOverload, disabled_torch_function_impl
from lamina.buffers.resolve_axes import Axis

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

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
        name: of the tensor that the place was made for; what is computed from that one keeps it.
        beyond: reaches the ranks with the other parts, where the tensor is itself one of the parts
            into which tp has cut a parameter. Reductions go over these ranks too.
    """

    shape: torch.Size
    start: int
    stop: int
    axes: tuple[Axis, ...] = ()
    communicator: SpanCommunicator | None = None
    extents: Extents | None = field(default=None, repr=False, compare=False)
    name: str = field(default="", repr=False, compare=False)
    beyond: SpanCommunicator | None = field(default=None, repr=False, compare=False)

    @cached_property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the whole in row-major order."""
        # As torch has them: a dimension without elements counts as one of a single element.
        sizes = (max(size, 1) for size in reversed(self.shape))
        *strides, _ = accumulate(sizes, mul, initial=1)
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

    def must_match(self, other: SpanSpec, operation: object) -> None:
        """ValueError: elements at the same place are not the same element of the whole."""
        if not self.matches(other):
            raise ValueError(
                f"{operation}: operands are cut differently: shape {list(self.shape)} span "
                f"{self.start}..{self.stop}, and shape {list(other.shape)} span "
                f"{other.start}..{other.stop}. Both must come from one layout; broadcasting "
                "between ShardedTensors is not supported: use .full_tensor(), or go through "
                "torch.distributed.checkpoint"
            )

    def __deepcopy__(self, memo: dict[int, object]) -> SpanSpec:
        # Nothing here changes, and a communicator has no copy: copied tensors reach the same ranks.
        return self

    def where(self) -> str:
        """This rank's coordinates, for messages."""
        places = ", ".join(f"{axis.name}={axis.rank}/{axis.size}" for axis in self.axes)
        return places or "whole on every rank"

    def described(self) -> str:
        """The shape, whose it is, and this rank's coordinates, for messages."""
        name = f"that of {self.name}; " if self.name else ""
        return f"shape {list(self.shape)} ({name}{self.where()})"

    def reach(self, operation: str) -> SpanCommunicator:
        """The communicator; RuntimeError says what to call instead of `operation` without one."""
        if self.communicator is None:
            raise RuntimeError(
                f"{operation} of a ShardedTensor of {self.described()} "
                "needs the other ranks' spans, and it was made without a communicator: pass "
                "communicator=SpanGroups(...), from lamina.collectives.engine, to the FlatBuffer "
                "or ShardedTensor, use .to_local() for this rank's span, or lamina.ddp's "
                "full_parameters, full_gradients and clip_grad_norm"
            )
        return self.communicator


Handler: TypeAlias = Callable[..., Any]


class HandlerTable(dict[OpOverload, Handler]):
    """Operation to handler; fill it with the `handles` decorator."""

    def handles(self, *overloads: OpOverload) -> Callable[[Handler], Handler]:
        """Register a function for some overloads."""

        def register(handler: Handler) -> Handler:
            """Enter the handler, and give it back."""
            self.update(dict.fromkeys(overloads, handler))
            return handler

        return register


class SpanTensor(torch.Tensor):
    """Base of `ShardedTensor` and `TensorPart`: a rank's elements and their place in the whole.

    Handlers know no more than this. Operands of both classes never reach a handler together.
    """

    _local: torch.Tensor
    _spec: SpanSpec
    # Note [Slots of a tensor subclass]
    # Each subclass names all of its slots itself. The stager of asynchronous checkpoints copies
    # what `type(tensor).__slots__` names, which leaves out the slots of base classes: a span that
    # only the base named would be shared with training, and the next step would overwrite it while
    # the file is written.
    __slots__ = ()
    __torch_function__ = disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # A span and a part of a span count elements from different beginnings.
        if len(types) > 1 and any(
            issubclass(kind, SpanTensor) and not issubclass(cls, kind) for kind in types
        ):
            names = " and ".join(kind.__name__ for kind in types)
            raise NotImplementedError(f"{func} of {names} together: use .to_local() of both")
        return cls._run(func, args, kwargs or {})

    @classmethod
    def _run(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on this rank's elements. Called by torch below autograd."""
        raise NotImplementedError

    def _with(self, local: torch.Tensor, spec: SpanSpec | None = None) -> SpanTensor:
        """A tensor of this class that holds `local`, at this tensor's place or at `spec`."""
        raise NotImplementedError

    def boxes(self) -> Sequence[Any]:
        """This rank's elements as boxes of the whole, with `offsets` and `sizes`."""
        raise NotImplementedError

    def view_of(self, box: Any) -> torch.Tensor:
        """One of `boxes` as a view of this rank's elements."""
        raise NotImplementedError

    # -- torch.distributed.checkpoint's protocol: boxes from the layout, no collectives ------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box in self.boxes()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """One item per box. Replicas give equal items; DCP's planner drops all but one of them."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        # Of the span, which has the memory: asked of this tensor, torch would look for storage.
        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for box in self.boxes():
            # A tensor that is one box is asked for without an offset.
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                return self.view_of(box)
        spec = self._spec
        raise ValueError(
            f"{index.fqn}: no box of span {spec.start}..{spec.stop} of shape {list(spec.shape)} "
            f"starts at {index.offset} ({spec.where()})"
        )
