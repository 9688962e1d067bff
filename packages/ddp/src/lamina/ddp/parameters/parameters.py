"""Which parameters share a buffer: finding a module's parameters and sorting them into groups."""

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lamina.buffers import BufferLayout, Granularity, TensorSpec
from lamina.mesh import Role, role_of


@dataclass(frozen=True)
class ParameterRef:
    """One parameter and every place that holds it (tied parameters have several).

    Attributes:
        name: its first qualified name in the root module.
        parameter: the parameter itself.
        owners: (module, attribute) of each place, in order of registration. The modules are weak
            references: a module holds its engine through its hooks, and must not be held by it.
        role: what it is to the mesh.
    """

    name: str
    parameter: nn.Parameter
    owners: tuple[tuple[weakref.ref[nn.Module], str], ...]
    role: Role

    def install(self, parameter: nn.Parameter) -> None:
        """Put `parameter` in every place that holds this one."""
        for reference, attribute in self.owners:
            # Not setattr: nn.Module's checks cost more than the swap.
            if (module := reference()) is not None:
                module._parameters[attribute] = parameter


def title_of(refs: Sequence[ParameterRef]) -> str:
    """Name a group for messages and records: its first parameter, and how many more it has."""
    more = f" and {len(refs) - 1} more" if len(refs) > 1 else ""
    return f"{refs[0].name}{more}"


@dataclass(frozen=True)
class GroupKey:
    """What parameters must agree on to share a buffer (docs/index.md, "group")."""

    dtype: torch.dtype
    requires_grad: bool
    expert: bool
    tp_sharded: bool
    tp_grad: str | None
    tied: str | None
    """Parameters tied across pipeline stages get a group each, so that both stages cut it alike."""
    copy: int = 0
    """Which of the parameters with one `tied` name it is: copies are summed, so cut alike."""


def collect_parameters(module: nn.Module) -> list[ParameterRef]:
    """Every parameter of a module once, in order of registration, with all places that hold it.

    ValueError: two parameters have elements of one memory in common, or one has no shape yet.
    """
    names: dict[int, str] = {}
    parameters: dict[int, nn.Parameter] = {}
    owners: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            if is_lazy(parameter):
                raise ValueError(
                    f"{name} of {type(child).__name__} has no shape before the first forward, so "
                    "no buffer can have a place for it: call the model once with a batch before it "
                    "is wrapped"
                )
            # Tied parameters are one object in several places: the first place names it.
            key = id(parameter)
            names.setdefault(key, name)
            parameters.setdefault(key, parameter)
            owners.setdefault(key, []).append((weakref.ref(child), attribute))
    refs = [
        ParameterRef(names[key], parameter, tuple(owners[key]), role_of(parameter))
        for key, parameter in parameters.items()
    ]
    _refuse_shared_memory(refs)
    return refs


def _refuse_shared_memory(refs: Iterable[ParameterRef]) -> None:
    """Raise for parameters that are views of the same elements: buffers would untie them."""
    by_memory: dict[int, list[ParameterRef]] = {}
    for ref in refs:
        if not (_is_subclass(type(ref.parameter)) or ref.parameter.layout is not torch.strided):
            by_memory.setdefault(ref.parameter.untyped_storage().data_ptr(), []).append(ref)
    for memory, sharing in by_memory.items():
        if memory == 0 or len(sharing) == 1:  # zero: meta tensors, and tensors without elements
            continue
        # In order of memory: if any two meet, then two neighbours do.
        sharing.sort(key=lambda ref: _bytes_of(ref.parameter))
        for before, ref in pairwise(sharing):
            (_, end), (start, _) = _bytes_of(before.parameter), _bytes_of(ref.parameter)
            if start < end and _elements_meet(sharing):
                raise ValueError(
                    f"{ref.name} and {before.name} are two parameters over the same memory, and "
                    "would get a place each in flat buffers: training would drive them apart. Tie "
                    f"them as one parameter before wrapping (such as {ref.name} = {before.name}), "
                    "or give one of them memory of its own (clone)"
                )


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one after its last."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else -1
    start = int(tensor.storage_offset())
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _elements_meet(refs: Sequence[ParameterRef]) -> bool:
    """Whether an element is in two parameters: columns of one matrix lie between one another."""
    size = refs[0].parameter.element_size()
    if any(ref.parameter.element_size() != size for ref in refs):
        return True
    # A map of the whole storage, in elements. Each parameter marks its own in its own strides.
    taken = torch.zeros(
        refs[0].parameter.untyped_storage().nbytes() // size, dtype=torch.bool, device="cpu"
    )
    for ref in refs:
        tensor = ref.parameter
        mine = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if bool(mine.any()):
            return True
        mine.fill_(True)
    return False


def group_parameters(refs: Iterable[ParameterRef]) -> Iterator[tuple[GroupKey, list[ParameterRef]]]:
    """Sort parameters into groups, each in order of registration.

    TypeError: one is no plain tensor of real numbers.
    """
    groups: dict[GroupKey, list[ParameterRef]] = {}
    refs = list(refs)
    _warn_of_memory_format(refs)
    for ref in refs:
        _refuse_kind(ref)
        role = ref.role
        key = GroupKey(
            ref.parameter.dtype,
            ref.parameter.requires_grad,
            role.expert,
            role.tp_shard_dim is not None,
            role.tp_grad,
            role.tied,
        )
        # A tied parameter is alone in its group: another stage has no neighbours of the same sizes.
        while key.tied is not None and key in groups:
            key = replace(key, copy=key.copy + 1)
        groups.setdefault(key, []).append(ref)
    yield from groups.items()


def _refuse_kind(ref: ParameterRef) -> None:
    parameter, cls = ref.parameter, type(ref.parameter)
    if parameter.dtype.is_complex:
        raise TypeError(
            f"{ref.name} is {parameter.dtype}, and gradients are summed over ranks as real "
            "(complex ones are not): hold torch.view_as_real(value) as the parameter, and take "
            "torch.view_as_complex of it in forward"
        )
    if parameter.layout is not torch.strided:
        raise TypeError(
            f"{ref.name} has the layout {parameter.layout}, and a flat buffer holds strided "
            "tensors only: hold its dense values as the parameter"
        )
    if _is_subclass(cls):
        raise TypeError(
            f"{ref.name} is a {cls.__name__}, a tensor subclass that takes operators into its own "
            "hands: in a flat buffer it would become a plain tensor. Wrap the model before its "
            "weights are converted (quantised), or leave such modules outside the wrapped model"
        )


def _warn_of_memory_format(refs: Sequence[ParameterRef]) -> None:
    last = [
        ref.name for ref in refs if ref.parameter.dim() > 3 and not ref.parameter.is_contiguous()
    ]
    if last:
        warnings.warn(
            f"{last[0]} and {len(last) - 1} more parameters are channels_last, and become "
            "contiguous in their flat buffers: numbers stay the same, convolutions may be slower. "
            "Inputs can still be channels_last",
            stacklevel=2,
        )


def _is_subclass(cls: type[torch.Tensor]) -> bool:
    """Whether a class of tensors takes operators into its own hands."""
    return cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or _function_of(
        cls
    ) not in (_function_of(nn.Parameter), _function_of(torch.Tensor))


def _function_of(cls: type[torch.Tensor]) -> object:
    return getattr(cls.__torch_function__, "__func__", cls.__torch_function__)


def spec_of(ref: ParameterRef, granularity: Granularity | None = None) -> TensorSpec:
    """The layout's view of a parameter: a role's `block_rows` wins over the default granularity.

    A tensor that is not cut at all keeps its blocks too.
    """
    whole = granularity is not None and granularity.kind == "tensor"
    if ref.role.block_rows is not None and not whole:
        granularity = Granularity.block(ref.role.block_rows)
    return TensorSpec(ref.name, tuple(ref.parameter.shape), granularity or Granularity.element())


def read_parameters(
    refs: Sequence[ParameterRef], layout: BufferLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """All parameters, in the layout's order, as one flat tensor; their own memory if it is that."""
    # Values that were made in the layout's order are taken as they lie: no second copy.
    whole = _laid_out_already(refs, layout, dtype, device)
    if whole is None:
        whole = torch.zeros(layout.size, dtype=dtype, device=device)
        with torch.no_grad():
            for ref, view in zip(refs, layout.views(whole), strict=True):
                view.copy_(ref.parameter)
    return whole


def _laid_out_already(
    refs: Sequence[ParameterRef], layout: BufferLayout, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """The parameters' own memory, where somebody made them as the layout has them."""
    places = zip(refs, layout.specs, layout.offsets, strict=True)
    placed = [(ref.parameter, offset) for ref, spec, offset in places if spec.numel]
    if not placed:
        return None
    # If the first one lies right, all others must lie at their distances from it.
    first, start = placed[0]
    storage = first.untyped_storage()
    base = first.storage_offset() - start
    end = (base + layout.size) * first.element_size()
    if base < 0 or end > storage.nbytes() or first.dtype != dtype or first.device != device:
        return None
    for parameter, offset in placed:
        if (
            parameter.untyped_storage().data_ptr() != storage.data_ptr()
            or parameter.storage_offset() - base != offset
            or parameter.dtype != first.dtype
            or not parameter.is_contiguous()
        ):
            return None
    # A tensor over the same memory. Nobody has written the padding, and it is summed and sent.
    whole = torch.empty(0, dtype=dtype, device=device)
    with torch.no_grad():
        whole.set_(storage, base, (layout.size,), (1,))
        for start, stop in layout.padding_ranges():
            whole[start:stop].zero_()
    return whole
