"""`FlatBuffer`: one state (weights, gradients, ...) of a group of parameters in one flat tensor."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch

from lamina.buffers.compat import make_wrapper_subclass
from lamina.buffers.layout.layout import BufferLayout, Span
from lamina.buffers.placement import Cut, Partial, Placement, Replicate, Shard, as_placements
from lamina.buffers.resolve_axes import Axis, MeshLike, resolve_axes
from lamina.buffers.tensors.sharded_tensor import ShardedTensor
from lamina.buffers.tensors.span_moves import copy_span
from lamina.buffers.tensors.span_tensor import SpanCommunicator, SpanSpec


class FlatBuffer:
    """Storage of one state, laid out by a `BufferLayout` and placed along data-parallel axes.

    With several Shard axes the innermost cuts first: rank (o, i) of O x I holds piece
    `i * O + o`.

    Args:
        layout: where the tensors lie; its `num_shards` is a multiple of the number of pieces.
        placement: one placement, or one per axis, outer axis first.
        dtype: element type.
        device: where the storage lies.
        mesh: the axes, outer first (see `resolve_axes`); None for a world of one.
        storage: a flat tensor to use instead of new memory (zeros): the elements of `range`.
        communicator: reaches the ranks of the Shard axes, handed to ShardedTensors.
        lazy: take memory (uninitialised) at the first use of `data`, and again after `release`.

    Attributes:
        cuts: for each axis, outer first, whether it cuts the buffer.
        range: elements `(start, stop)` of the layout that `data` holds.
        numel: number of elements that this rank holds, padding included.
        is_whole: whether this rank holds every element of the layout.
        has_memory: whether `data` has memory now (always, unless `lazy`).

    Raises:
        ValueError: axes and placements differ in number, pieces do not divide the shards, or the
            storage has another size, dtype or device.

    Examples:
        >>> layout = BufferLayout.plan([TensorSpec("q", (8, 4))], num_shards=1)
        >>> FlatBuffer(layout, Replicate()).views()["q"].shape
        torch.Size([8, 4])
    """

    def __init__(
        self,
        layout: BufferLayout,
        placement: Placement | Sequence[Placement],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        mesh: MeshLike | None = None,
        *,
        storage: torch.Tensor | None = None,
        communicator: SpanCommunicator | None = None,
        lazy: bool = False,
    ) -> None:
        self.layout = layout
        self.placement = as_placements(placement)
        self.axes: tuple[Axis, ...] = resolve_axes(mesh, len(self.placement))
        self.communicator = communicator
        sizes = tuple(axis.size for axis in self.axes)
        self._cut = Cut(sizes, tuple(placement.cuts for placement in self.placement))
        # Shards are the finest cut. A piece is a whole number of them, or its bounds would cut
        # what the layout keeps together.
        if layout.num_shards % self._cut.pieces:
            raise ValueError(
                f"a layout of {layout.num_shards} shards does not cut into {self._cut.pieces} "
                f"pieces ({self._where()}): num_shards must be a multiple of {self._cut.pieces}"
            )
        self.cuts = self._cut.sharded
        self.range = self._cut.range(layout.size, self._coordinate)
        self.numel = self.range[1] - self.range[0]
        self.is_whole = self.range == (0, layout.size)
        self.dtype = dtype
        # A device without a number becomes the one that memory is taken on.
        self.device = torch.empty(0, device=device).device if storage is None else storage.device
        self.has_memory = False
        self._lazy = lazy and storage is None
        if storage is not None:
            _check_storage(storage, self.numel, dtype, torch.device(device))
            self.data, self.has_memory = storage, True
        elif not lazy:
            self.data.zero_()

    @property
    def _coordinate(self) -> tuple[int, ...]:
        return tuple(axis.rank for axis in self.axes)

    def _where(self) -> str:
        return ", ".join(
            f"{axis.name}={axis.rank}/{axis.size} {type(placement).__name__}"
            for axis, placement in zip(self.axes, self.placement, strict=True)
        )

    @cached_property
    def data(self) -> torch.Tensor:
        """Flat tensor of all that this rank holds: elements `range` of the layout."""
        self.has_memory = True
        # Autograd could never save views of an inference tensor.
        with torch.inference_mode(False):
            return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    def release(self) -> None:
        """Let go of the memory, if it is `lazy`; views made before keep it alive for themselves."""
        if self._lazy and self.has_memory:
            del self.data
            self.has_memory = False

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Of each tensor, by position in the layout, the run that lies here.

        `shard` is the piece of the buffer that this rank holds, and `offset` counts in `data` (0
        for a run without elements).
        """
        piece, low = self._cut.piece(self._coordinate), self.range[0]
        spans = []
        for index, offset in enumerate(self.layout.offsets):
            # A tensor that lies elsewhere has an empty run, which still has a place: offset 0.
            start, stop = self.layout.within(index, *self.range)
            spans.append(Span(piece, start, stop, offset + start - low if stop > start else 0))
        return tuple(spans)

    def piece(self, placement: Placement | Sequence[Placement]) -> torch.Tensor:
        """The part of `data` this rank would hold under another (finer) placement: a view.

        Raises:
            ValueError: that part is not held here, or the placement names other axes in number.
        """
        chosen = as_placements(placement)
        if len(chosen) != len(self.axes):
            raise ValueError(f"{len(chosen)} placements for {len(self.axes)} axes")
        # The same ranks, another cut: a finer piece lies within this rank's only if the cuts nest.
        cut = Cut(self._cut.sizes, tuple(placement.cuts for placement in chosen))
        start, stop = cut.range(self.layout.size, self._coordinate)
        low, high = self.range
        if start < low or stop > high:
            raise ValueError(
                f"elements {start}..{stop} are not among {low}..{high} held here ({self._where()})"
            )
        return self.data[start - low : stop - low]

    @property
    def shard(self) -> torch.Tensor:
        """This rank's piece when the buffer is cut into all of the layout's shards: a view.

        The inner axes whose sizes multiply to `layout.num_shards` cut: a reduce-scatter's output
        inside a whole buffer, or an all-gather's input.

        Raises:
            ValueError: no such axes.
        """
        sizes = self._cut.sizes
        # From the innermost axis outwards, until the axes make as many pieces as there are shards.
        for first in range(len(sizes), -1, -1):
            if math.prod(sizes[first:]) == self.layout.num_shards and not any(
                self._cut.sharded[:first]
            ):
                return self.piece(
                    tuple(Replicate() if at < first else Shard() for at in range(len(sizes)))
                )
        raise ValueError(
            f"no inner axes of sizes {sizes} make {self.layout.num_shards} shards: use "
            ".piece(placement)"
        )

    def views(self) -> dict[str, torch.Tensor]:
        """Every tensor with its shape, as views of a buffer that this rank holds whole.

        Raises:
            ValueError: the buffer is cut. Gather it, or use `span_view` or `as_sharded`.
        """
        if not self.is_whole:
            raise ValueError(
                f"this rank holds elements {self.range[0]}..{self.range[1]} of "
                f"{self.layout.size} ({self._where()}): shaped views need the whole; use "
                "span_view(name) or as_sharded(name)"
            )
        return dict(zip(self.layout.names(), self.layout.views(self.data), strict=True))

    def span(self, name: str | int) -> tuple[int, int]:
        """Elements `(start, stop)` of a flattened tensor that this rank holds."""
        span = self.spans[self.layout.position(name)]
        return span.start, span.stop

    def span_view(self, name: str | int) -> torch.Tensor:
        """The elements of a tensor that this rank holds: a flat view, maybe empty."""
        position = name if isinstance(name, int) else self.layout.position(name)
        _, start, stop, offset = self.spans[position]
        return self.data[offset : offset + stop - start]

    def as_sharded(
        self, name: str | int, communicator: SpanCommunicator | None = None
    ) -> ShardedTensor:
        """A tensor under its global shape, sharing this buffer's memory.

        Args:
            name: which; its position in the layout will do.
            communicator: instead of the buffer's.

        Raises:
            ValueError: the buffer is Partial along an axis: its sums are no tensor yet.
        """
        layout, cut, position = self.layout, self._cut, self.layout.position(name)
        if any(isinstance(placement, Partial) for placement in self.placement):
            raise ValueError(
                f"{layout.specs[position].name}: this buffer is Partial ({self._where()}), its "
                "elements are still to be summed: reduce it first, then wrap the reduced piece "
                "with FlatBuffer(layout, Shard(), storage=...)"
            )
        # Along the other axes ranks hold copies: they are no part of the tensor's place.
        axes = tuple(axis for axis, cuts in zip(self.axes, self.cuts, strict=True) if cuts)

        # Lazily: it costs a step per rank, and few ask for it.
        def extents() -> list[tuple[int, int]]:
            """Of each rank of the axes that cut, the elements of the tensor that it holds."""
            length = layout.size // cut.pieces
            return [
                layout.within(position, piece * length, (piece + 1) * length)
                for piece in cut.pieces_by_rank()
            ]

        return ShardedTensor(
            self.span_view(position),
            layout.specs[position].shape,
            self.spans[position].start,
            axes,
            communicator=communicator or self.communicator,
            extents=extents,
            name=layout.specs[position].name,
        )

    def sharded(self) -> dict[str, ShardedTensor]:
        """Every tensor as `as_sharded` gives it."""
        return {name: self.as_sharded(name) for name in self.layout.names()}

    def sharded_at(self, places: Sequence[SpanSpec]) -> list[ShardedTensor]:
        """What `sharded` gives, by position in the layout, at places that are known. Not checked.

        A step makes them for all gradients that it shows. So there is no call for each.
        """
        made: list[ShardedTensor] = []
        for place, (_, start, stop, offset) in zip(places, self.spans, strict=True):
            tensor: ShardedTensor = make_wrapper_subclass(
                ShardedTensor,
                place.shape,
                strides=place.strides,
                dtype=self.dtype,
                device=self.device,
            )
            tensor._local, tensor._spec = self.data[offset : offset + stop - start], place
            made.append(tensor)
        return made

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a whole tensor's elements that belong here into the buffer.

        Args:
            name: which tensor of the layout.
            tensor: of its shape; any dtype, device and strides (only the span is copied), or a
                ShardedTensor that is cut alike.

        Raises:
            KeyError: no such tensor.
            ValueError: another shape. Names the tensor and both shapes.
        """
        spec = self.layout.spec(name)
        if tuple(tensor.shape) != spec.shape:
            raise ValueError(
                f"{name}: cannot load shape {list(tensor.shape)} into {list(spec.shape)}"
            )
        start, stop = self.span(name)
        with torch.no_grad():
            # `copy_` compares the two cuts. Of a plain tensor only the span is read.
            if isinstance(tensor, ShardedTensor):
                self.as_sharded(name).copy_(tensor)
            else:
                copy_span(self.span_view(name), tensor, start, stop)

    def load_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """`load` every tensor of the layout.

        Raises:
            ValueError: `tensors` lacks some. Names them.
        """
        missing = [name for name in self.layout.names() if name not in tensors]
        if missing:
            raise ValueError(f"{len(missing)} tensors are missing: {', '.join(missing[:8])}")
        for name in self.layout.names():
            self.load(name, tensors[name])

    def __repr__(self) -> str:
        return (
            f"FlatBuffer({len(self.layout.specs)} tensors, {self.numel} of "
            f"{self.layout.size} elements, {self.dtype}, {self.device}, {self._where()})"
        )


def _check_storage(
    storage: torch.Tensor, numel: int, dtype: torch.dtype, device: torch.device
) -> None:
    indices = (None, storage.device.index)
    same_device = storage.device.type == device.type and device.index in indices
    if storage.dim() != 1 or not storage.is_contiguous() or storage.numel() != numel:
        raise ValueError(
            f"storage has shape {list(storage.shape)}; a flat tensor of {numel} elements is needed"
        )
    if storage.dtype != dtype or not same_device:
        raise ValueError(
            f"storage is {storage.dtype} on {storage.device}, the buffer {dtype} on {device}"
        )
