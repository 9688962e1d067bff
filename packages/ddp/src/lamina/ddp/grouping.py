"""Which parameters share a buffer: finding a module's parameters and sorting them into groups."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from lamina.buffers import Granularity, TensorSpec
from lamina.mesh import Role, role_of

__all__ = ["GroupKey", "ParameterRef", "collect_parameters", "group_parameters", "spec_of"]


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
            module = reference()
            # Not setattr: nn.Module's checks cost more than the swap, which happens every forward.
            if module is not None:
                module._parameters[attribute] = parameter


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
    """Every parameter of a module once, in order of registration, with all places that hold it."""
    names: dict[int, str] = {}
    parameters: dict[int, nn.Parameter] = {}
    owners: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
    for prefix, child in module.named_modules():
        for attribute, parameter in child._parameters.items():
            if parameter is None:
                continue
            key = id(parameter)
            names.setdefault(key, f"{prefix}.{attribute}" if prefix else attribute)
            parameters.setdefault(key, parameter)
            owners.setdefault(key, []).append((weakref.ref(child), attribute))
    return [
        ParameterRef(names[key], parameter, tuple(owners[key]), role_of(parameter))
        for key, parameter in parameters.items()
    ]


def group_parameters(refs: Iterable[ParameterRef]) -> Iterator[tuple[GroupKey, list[ParameterRef]]]:
    """Sort parameters into groups, each in order of registration."""
    groups: dict[GroupKey, list[ParameterRef]] = {}
    for ref in refs:
        role = ref.role
        key = GroupKey(
            ref.parameter.dtype,
            ref.parameter.requires_grad,
            role.expert,
            role.tp_shard_dim is not None,
            role.tp_grad,
            role.tied,
        )
        while key.tied is not None and key in groups:
            key = replace(key, copy=key.copy + 1)
        groups.setdefault(key, []).append(ref)
    yield from groups.items()


def spec_of(ref: ParameterRef, granularity: Granularity | None = None) -> TensorSpec:
    """The layout's view of a parameter: a role's `block_rows` wins over the default granularity."""
    if ref.role.block_rows is not None:
        granularity = Granularity.block(ref.role.block_rows)
    return TensorSpec(ref.name, tuple(ref.parameter.shape), granularity or Granularity.element())
