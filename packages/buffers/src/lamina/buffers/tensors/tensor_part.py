"""`TensorPart`: one rank's share of a tensor that tp or ep has cut, for checkpoints."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from lamina.buffers.compat import OpOverload, make_wrapper_subclass
from lamina.buffers.layout.tensor_region import RegionBox, TensorRegion
from lamina.buffers.tensors.sharded_tensor import ShardedTensor
from lamina.buffers.tensors.span_moves import HANDLERS as MOVES
from lamina.buffers.tensors.span_moves import narrowed
from lamina.buffers.tensors.span_tensor import HandlerTable, SpanSpec, SpanTensor

aten = torch.ops.aten
_HANDLERS = HandlerTable(
    (operation, MOVES[operation])
    for operation in (
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten._pin_memory.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.is_pinned.default,
        aten.new_empty.default,  # DCP stages into `new_empty` of the tensor's own size
    )
)


class TensorPart(SpanTensor):
    """The elements a rank holds of a tensor that tp or ep has cut and data parallelism cut again.

    Its shape is that of the whole model's tensor, so that torch.distributed.checkpoint writes and
    reads one tensor whatever the mesh. It can be copied, staged, saved and loaded; to compute, use
    the parameter it was made from, whose memory it shares.

    Args:
        tensor: what this rank holds of its tp rank's tensor; a plain tensor is taken as all of it.
        region: where the tp rank's tensor lies in the whole.

    Raises:
        ValueError: the region is of another shape than the tensor, or a plain tensor is not
            contiguous.
    """

    _tensor_region: TensorRegion
    __slots__ = ("_local", "_spec", "_tensor_region")  # see Note [Slots of a tensor subclass]

    @staticmethod
    def __new__(  # noqa: D102 - documented by the class
        cls, tensor: ShardedTensor | torch.Tensor, region: TensorRegion
    ) -> TensorPart:
        if tuple(tensor.shape) != region.part_shape:
            raise ValueError(
                f"a tensor of shape {list(tensor.shape)} is not the part {region.part_shape} of "
                f"{region.shape}"
            )
        if not isinstance(tensor, ShardedTensor):
            if not tensor.is_contiguous():
                raise ValueError(f"strides {tensor.stride()}: pass a contiguous tensor")
            # A span of all of it, so that one way serves both.
            tensor = ShardedTensor(tensor.detach().view(-1), tensor.shape)
        return cls._wrap(tensor.to_local(), tensor.spec, region)

    @classmethod
    def _wrap(cls, local: torch.Tensor, spec: SpanSpec, region: TensorRegion) -> TensorPart:
        strides = torch.empty(region.shape, device="meta").stride()
        part: TensorPart = make_wrapper_subclass(
            cls, torch.Size(region.shape), strides=strides, dtype=local.dtype, device=local.device
        )
        part._local, part._spec, part._tensor_region = local, spec, region
        return part

    @property
    def tensor_region(self) -> TensorRegion:
        """Where the tp rank's tensor lies in the whole."""
        return self._tensor_region

    def to_local(self) -> torch.Tensor:
        """This rank's elements, flat: the memory of the parameter."""
        return self._local

    def _with(self, local: torch.Tensor, spec: SpanSpec | None = None) -> TensorPart:
        return self._wrap(local, spec or self._spec, self._tensor_region)

    def tensor(self) -> ShardedTensor | torch.Tensor:
        """What the tp rank's tensor is here: cut over data-parallel ranks, or plain if it is not.

        Shares this part's memory.
        """
        if self._spec.is_cut:
            return ShardedTensor.from_spec(self._local, self._spec)
        return self._local.view(self._tensor_region.part_shape)

    def boxes(self) -> tuple[RegionBox, ...]:
        """This rank's elements as boxes of the whole."""
        return self._tensor_region.boxes(self._spec.start, self._spec.stop)

    def view_of(self, box: RegionBox) -> torch.Tensor:
        """One of `boxes` as a view of this rank's elements."""
        start = box.box.start
        return self._local[start : start + box.box.numel].view(box.box.sizes)[box.inner]

    @classmethod
    def _run(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise NotImplementedError(
                f"{func} of a TensorPart: it is for checkpoints; compute with the parameter it was "
                "made from, or on .to_local()"
            )
        return handler(func, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorPart:
        return self._with(self._local.clone())

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            "a TensorPart is not pickled: save it with torch.distributed.checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"TensorPart(shape={list(self.shape)}, span={self._spec.start}..{self._spec.stop} of "
            f"{self._tensor_region.part_shape}, {self._spec.where()}, local={self._local})"
        )


@_HANDLERS.handles(aten.copy_.default)
def _copy(
    func: OpOverload, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
) -> TensorPart:
    """From a part of the same place, or from the whole as a plain tensor."""
    if not isinstance(target, TensorPart):
        raise NotImplementedError("copy_ of a TensorPart into another kind of tensor")
    if isinstance(source, TensorPart):
        if source._tensor_region != target._tensor_region or not source._spec.matches(target._spec):
            raise ValueError(f"copy_: {source!r} is another part than {target!r}")
        target._local.copy_(source._local)
        return target
    if source.shape != target.shape:
        raise ValueError(
            f"copy_: a {type(source).__name__} of shape {list(source.shape)} is not the whole of "
            f"shape {list(target.shape)}"
        )
    # Fused matrices lie apart in the whole, so it is taken box by box.
    for box in target.boxes():
        target.view_of(box).copy_(narrowed(source, box.offsets, box.sizes))
    return target
