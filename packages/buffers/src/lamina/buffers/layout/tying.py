"""Tied parameters stored once: many names, one tensor, one spec."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from lamina.buffers.layout.granularity import Granularity, TensorSpec

__all__ = ["CollectedSpecs", "collect_specs"]


@dataclass(frozen=True)
class CollectedSpecs:
    """Specs of different tensors, and which names mean the same one.

    Attributes:
        specs: one per tensor, in order of first appearance, under its first name.
        canonical: every name, to the name of its spec.
    """

    specs: tuple[TensorSpec, ...]
    canonical: Mapping[str, str]


def collect_specs(
    named_tensors: Iterable[tuple[str, torch.Tensor]],
    granularity: Granularity | Callable[[str, torch.Tensor], Granularity] | None = None,
) -> CollectedSpecs:
    """Specs for named tensors, tied ones once.

    Two names are tied when they mean one Parameter object or the same view of the same storage.

    Args:
        named_tensors: such as `module.named_parameters(remove_duplicate=False)`.
        granularity: one for all, or chosen by name and tensor; element by default.

    Raises:
        ValueError: one name twice, or two different views that overlap in memory (storing them
            apart would silently untie them).
    """
    specs: list[TensorSpec] = []
    canonical: dict[str, str] = {}
    seen: dict[object, str] = {}
    ranges: dict[int, list[tuple[int, int, str]]] = {}
    # A list: identity means something only while every tensor is alive.
    for name, tensor in list(named_tensors):
        if name in canonical:
            raise ValueError(f"two tensors are named {name!r}")
        first = seen.get(id(tensor)) or seen.get(_view_of(tensor))
        if first is not None:
            canonical[name] = first
            continue
        _refuse_overlap(name, tensor, ranges)
        seen[id(tensor)] = name
        if tensor.numel():
            seen[_view_of(tensor)] = name
        canonical[name] = name
        chosen = granularity(name, tensor) if callable(granularity) else granularity
        specs.append(TensorSpec(name, tuple(tensor.shape), chosen or Granularity.element()))
    return CollectedSpecs(tuple(specs), canonical)


def _view_of(tensor: torch.Tensor) -> object:
    """What makes two tensor objects the same memory, on meta devices too."""
    storage = tensor.untyped_storage()._cdata
    return (
        storage,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _refuse_overlap(
    name: str, tensor: torch.Tensor, ranges: dict[int, list[tuple[int, int, str]]]
) -> None:
    if not tensor.numel():
        return
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    stop = start + (reach + 1) * tensor.element_size()
    others = ranges.setdefault(tensor.untyped_storage()._cdata, [])
    for low, high, other in others:
        if start < high and low < stop:
            raise ValueError(
                f"{name!r} and {other!r} share memory but are different views of it: a flat buffer "
                "would store them apart. Make them one Parameter, or clone one of them"
            )
    others.append((start, stop, name))
