"""`ShardedTensor`: a tensor of global shape of which this rank holds one contiguous span."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from lamina.buffers.compat import OpOverload, foreach_types, is_traced, make_wrapper_subclass
from lamina.buffers.layout.boxes import Box, boxes_of_span
from lamina.buffers.resolve_axes import Axis
from lamina.buffers.tensors.span_ops import dispatch
from lamina.buffers.tensors.span_tensor import Extents, SpanCommunicator, SpanSpec, SpanTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


class ShardedTensor(SpanTensor):
    """A tensor cut into contiguous runs of its flattened elements, one per rank.

    `shape`, `numel()` and `stride()` are those of the whole; `to_local` is this rank's span.
    Pointwise operations, `torch._foreach_*` and fused optimizer kernels work on spans alone.
    Sums, norms and `full_tensor` need the other ranks and go through the communicator. Whatever
    can't be right on a span raises NotImplementedError with what to call instead.

    Args:
        local: flat, contiguous, this rank's elements; may be empty. Not copied.
        shape: global shape.
        start: which element of the flattened whole is `local[0]`.
        axis: the mesh axis (or axes, outer first) that cut it; None where `local` is the whole.
        communicator: reaches the other ranks, for reductions and `full_tensor`.
        extents: a callable that gives every rank's `(start, stop)` in the communicator's order;
            without it they are gathered when first needed.
        requires_grad: as for any tensor.
        name: for messages about this tensor and what is computed from it.

    Raises:
        TypeError: `local` is no plain tensor.
        ValueError: `local` is not flat or does not fit in `shape` at `start`.

    Examples:
        >>> tensor = ShardedTensor(torch.ones(12), shape=(4, 3))  # one rank holds all
        >>> (2 * tensor).full_tensor().shape
        torch.Size([4, 3])
    """

    __slots__ = ("_local", "_spec")  # see Note [Slots of a tensor subclass]

    @staticmethod
    def __new__(  # noqa: D102 - documented by the class
        cls,
        local: torch.Tensor,
        shape: Sequence[int],
        start: int = 0,
        axis: Axis | Sequence[Axis] | None = None,
        *,
        communicator: SpanCommunicator | None = None,
        extents: Extents | None = None,
        requires_grad: bool = False,
        name: str = "",
    ) -> ShardedTensor:
        axes = () if axis is None else (axis,) if isinstance(axis, Axis) else tuple(axis)
        size = torch.Size(shape)
        spec = SpanSpec(size, start, start + local.numel(), axes, communicator, extents, name)
        _check(local, spec)
        made = cls.from_spec(local.detach(), spec)
        if requires_grad:
            made.requires_grad_()
        return made

    @classmethod
    def from_spec(cls, local: torch.Tensor, spec: SpanSpec) -> ShardedTensor:
        """A tensor that holds `local` at a place that is known (`.spec` of another). Not checked.

        Args:
            local: as many elements as `spec` says, without autograd's history.
            spec: the place.
        """
        wrapper: ShardedTensor = make_wrapper_subclass(
            cls, spec.shape, strides=spec.strides, dtype=local.dtype, device=local.device
        )
        wrapper._local = local
        wrapper._spec = spec
        return wrapper

    def to_local(self) -> torch.Tensor:
        """This rank's span: flat, contiguous, maybe empty. Shares memory with this tensor."""
        return self._local

    def _with(self, local: torch.Tensor, spec: SpanSpec | None = None) -> ShardedTensor:
        return ShardedTensor.from_spec(local, spec or self._spec)  # whatever class stands for it

    @property
    def spec(self) -> SpanSpec:
        """Where the span lies in the whole, and how other ranks are reached."""
        return self._spec

    @property
    def start(self) -> int:
        """Element of the flattened whole at which the span starts."""
        return self._spec.start

    @property
    def stop(self) -> int:
        """Element of the flattened whole at which the span ends."""
        return self._spec.stop

    def full_tensor(self) -> torch.Tensor:
        """The whole as a plain tensor, on every rank. Collective where the tensor is cut.

        Autograd follows it, unless gradients are off: what ranks compute from the whole may differ,
        and the span's gradient is the mean of theirs (collective in backward).

        Raises:
            RuntimeError: the tensor is cut and has no communicator.
        """
        if self.requires_grad and torch.is_grad_enabled():
            whole: torch.Tensor = _FullTensor.apply(self)  # type: ignore[no-untyped-call]
            return whole
        spec = self._spec
        local = self._local
        if not spec.is_cut:
            return local.clone().view(spec.shape)
        communicator = spec.reach("full_tensor()")
        extents = self.extents()
        numels = [stop - start for start, stop in extents]
        flat = communicator.all_gather(local.contiguous(), numels)
        if all(before[1] == after[0] for before, after in pairwise(extents)):
            return flat.view(spec.shape)  # ranks in element order: gathered straight into place
        # With several axes the inner one cuts first, so ranks are not in element order.
        whole = torch.empty(spec.numel, dtype=local.dtype, device=local.device)
        at = 0
        for (start, stop), numel in zip(extents, numels, strict=True):
            whole[start:stop].copy_(flat[at : at + numel])
            at += numel
        return whole.view(spec.shape)

    def extents(self) -> tuple[tuple[int, int], ...]:
        """`(start, stop)` of every rank's span, in the communicator's order.

        Collective where the tensor was made without `extents` (one small gather).
        """
        spec = self._spec
        if not spec.is_cut:
            return ((spec.start, spec.stop),)
        if spec.extents is not None:
            return tuple(spec.extents())
        # How the others were cut is not known here, only how many they are.
        communicator = spec.reach("extents()")
        mine = torch.tensor([spec.start, spec.stop], dtype=torch.int64, device=self._local.device)
        pairs = communicator.all_gather(mine, [2] * communicator.size).view(-1, 2).tolist()
        return tuple((start, stop) for start, stop in pairs)

    def untyped_storage(self) -> torch.UntypedStorage:
        """Refused: the elements of other ranks have no storage here (and `data_ptr()` is 0).

        `torch.compile` alone gets what stands for one, by which it tells inputs apart.

        Raises:
            RuntimeError: outside of its tracing, with what to call instead.
        """
        if not is_traced():
            self._refuse_storage("untyped_storage()")
        return super().untyped_storage()

    def storage(self) -> NoReturn:
        """Refused, as `untyped_storage` is."""
        self._refuse_storage("storage()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refused, as `untyped_storage` is."""
        self._refuse_storage("numpy()")

    def _refuse_storage(self, asked: str) -> NoReturn:
        # Not NotImplementedError: safetensors takes that for a tensor without storage, and goes on.
        raise RuntimeError(
            f"{asked} of a ShardedTensor of {self._spec.described()}: other ranks hold the rest. "
            "For files of whole tensors take the state from "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), such as save_pretrained(..., "
            "state_dict=state); for one tensor .full_tensor(), or .to_local() for this rank's span"
        )

    def to_dtensor(self, mesh: DeviceMesh, tp_placements: Sequence[Placement] = ()) -> DTensor:
        """This tensor as a torch DTensor, without a copy, where the cut is `torch.chunk`'s.

        Args:
            mesh: the axes that cut this tensor, outer first, then tensor-parallel dimensions.
            tp_placements: torch's placements along the latter.

        Raises:
            NotImplementedError: the rows of some rank are not torch.chunk's: a DTensor of them
                would be silently wrong.
        """
        # DTensor takes long to import and few need it.
        from lamina.buffers.tensors.dtensor_view import to_dtensor

        return to_dtensor(self._local, self._spec, mesh, tp_placements)

    # -- torch's hooks for tensor subclasses ------------------------------------------------------

    @classmethod
    def _run(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = dispatch(func, args, kwargs)
        if func._schema.is_mutable and isinstance(args[0], list | tuple):
            # torch counts writes through lists where it unpacks them, which is beneath this class.
            torch.autograd.graph.increment_version(
                [t for t in args[0] if isinstance(t, ShardedTensor)]
            )
        return result

    def __tensor_flatten__(self) -> tuple[list[str], SpanSpec]:
        return ["_local"], self._spec

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor],
        spec: SpanSpec,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> ShardedTensor:
        return ShardedTensor.from_spec(inner["_local"], spec)

    # Note [Assigning .data of a wrapper]
    # torch's setter of `.data` swaps the sizes of the outer tensor only. The span would stay as it
    # was, and an optimizer that works on spans would go on with the old values. So it is refused.
    @property
    def data(self) -> torch.Tensor:
        """The same span without its autograd history, as for any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> NoReturn:
        """Refused: see Note [Assigning .data of a wrapper]."""
        raise NotImplementedError(
            "assigning .data of a ShardedTensor would leave its span behind: use .copy_(), "
            "torch.utils.swap_tensors, or make a new parameter"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spec = self._spec
        grad = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"ShardedTensor(shape={list(spec.shape)}, span={spec.start}..{spec.stop} of "
            f"{spec.numel}, {spec.where()}, local={self._local}{grad})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            copied: torch.Tensor = memo[id(self)]
            return copied
        if not self.is_leaf:
            raise RuntimeError(
                "only ShardedTensors made by the user (leaves) can be deep-copied: detach() first"
            )
        made: torch.Tensor = self._with(self._local.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        else:
            made.requires_grad_(self.requires_grad)
        # Before the attributes, which may refer to this tensor.
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotImplementedError(
            "a ShardedTensor is not pickled: torch.save would write this rank's span alone and "
            "nothing could put it back. Save it with torch.distributed.checkpoint (it is read on "
            "any number of ranks), or save .full_tensor(), which all ranks have to call; "
            "fully_shard(..., preproc_state_dict_for_dcp_ckpt=False) lets state_dict() hold "
            "whole tensors"
        )

    def boxes(self) -> tuple[Box, ...]:
        """This rank's span as boxes of the whole."""
        spec = self._spec
        if not spec.numel and spec.start == spec.stop:
            # A tensor without elements still has a name and a shape to store: one, of every rank.
            return (Box((0,) * len(spec.shape), tuple(spec.shape), 0),)
        return boxes_of_span(spec.shape, spec.start, spec.stop)

    def view_of(self, box: Box) -> torch.Tensor:
        """One of `boxes` as a view of the span."""
        return self._local[box.start : box.start + box.numel].view(box.sizes)


class _FullTensor(torch.autograd.Function):
    """The whole of a ShardedTensor, with a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: ShardedTensor) -> torch.Tensor:
        """Gather the whole; collective."""
        ctx.spec = tensor.spec
        # Without autograd's history, or `full_tensor` would come here again.
        return ShardedTensor.from_spec(tensor.to_local(), tensor.spec).full_tensor()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> ShardedTensor:
        """This rank's span of the mean over ranks (Note [Gradients of a span]); collective."""
        spec: SpanSpec = ctx.spec
        whole = gradient.contiguous()
        if spec.is_cut:
            communicator = spec.reach("the backward of full_tensor()")
            whole = communicator.all_reduce(whole.clone(), "sum").div_(communicator.size)
        return ShardedTensor.from_spec(whole.view(-1)[spec.start : spec.stop].clone(), spec)


def _check(local: torch.Tensor, spec: SpanSpec) -> None:
    if isinstance(local, ShardedTensor) or hasattr(local, "device_mesh"):
        raise TypeError(
            f"the span of a ShardedTensor is a plain tensor, got {type(local).__name__}: pass "
            ".to_local()"
        )
    if local.dim() != 1 or not local.is_contiguous():
        raise ValueError(
            f"the span of a ShardedTensor is flat and contiguous, got shape {list(local.shape)} "
            f"and strides {local.stride()}: pass local.reshape(-1)"
        )
    numel = math.prod(spec.shape)
    if spec.start < 0 or spec.stop > numel:
        raise ValueError(
            f"span {spec.start}..{spec.stop} is not inside a tensor of shape {list(spec.shape)} "
            f"({numel} elements)"
        )
    if not spec.is_cut and spec.local_numel != numel:
        raise ValueError(
            f"{spec.local_numel} of {numel} elements are given but no axis of more than one rank "
            "that the rest could lie on: pass axis="
        )


# torch's optimizers and clip_grad_norm_ choose their foreach paths by exact type. DTensor enters
# itself in the same two lists. Only tensors of this class are affected.
for supported in foreach_types():
    if ShardedTensor not in supported:
        supported.append(ShardedTensor)
