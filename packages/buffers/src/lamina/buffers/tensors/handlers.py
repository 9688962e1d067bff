"""What every tensor that holds a span has, and the tables of what it does with aten operations.

torch.distributed.checkpoint stores boxes (offsets and sizes). A span is a few boxes, each of them a
contiguous run of the span, so nothing is copied to write one or to read one back.

A handler takes the operation and then the operation's own arguments, with its schema's defaults:
`def _sum(func, tensor, dim=None, keepdim=False, *, dtype=None)`. torch passes the arguments that
the schema marks as keyword-only by keyword and all others by position, without trailing defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from lamina.buffers.compat import OpOverload, disabled_torch_function_impl
from lamina.buffers.tensors.span_spec import SpanSpec

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["Handler", "HandlerTable", "SpanTensor"]

Handler: TypeAlias = Callable[..., Any]


class HandlerTable(dict[OpOverload, Handler]):
    """Operation to handler; fill it with the `handles` decorator."""

    def handles(self, *overloads: OpOverload) -> Callable[[Handler], Handler]:
        """Register a function for some overloads."""

        def register(handler: Handler) -> Handler:
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
        if len(types) > 1 and any(
            issubclass(one, SpanTensor) and not issubclass(cls, one) for one in types
        ):
            names = " and ".join(one.__name__ for one in types)
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
            if index.offset is None or torch.Size(box.offsets) == index.offset:
                return self.view_of(box)
        spec = self._spec
        raise ValueError(
            f"{index.fqn}: no box of span {spec.start}..{spec.stop} of shape {list(spec.shape)} "
            f"starts at {index.offset} ({spec.where()})"
        )
