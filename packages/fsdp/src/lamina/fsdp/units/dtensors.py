"""Parameters that torch's tensor parallelism has cut: DTensors to the module, local to the engine.

`parallelize_module` makes parameters DTensors over the tp axis. What this rank holds of one is an
ordinary tensor, and that is what is cut again along the data-parallel axes, gathered, and given
gradients. While its unit computes, the module sees a DTensor made of it; autograd brings the
gradient back to the local tensor (and sums it over tp where the parameter is replicated).
"""

import weakref
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lamina.buffers.engine import Run, TensorRegion
from lamina.ddp.engine import ParameterRef, collect_parameters
from lamina.fsdp.compat import local_shape_and_offset
from lamina.mesh import mark

_FORM = "_lamina_dtensor_form"
_LOCALISED = "_lamina_localised"


@dataclass(frozen=True)
class _Form:
    """How the local tensor is part of a DTensor."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def localise_dtensors(module: nn.Module, ignored: Collection[int] = ()) -> None:
    """Put local parameters in place of DTensor parameters, marked with what tp has cut.

    `ignored` are `id`s of parameters to leave alone. ValueError refuses a DTensor on the meta
    device, or cut along more than one dimension.
    """
    pairs: list[tuple[weakref.ref[torch.Tensor], nn.Parameter]] = []
    for ref in collect_parameters(module):
        if hasattr(ref.parameter, "placements") and id(ref.parameter) not in ignored:
            local = _local_of(ref)
            ref.install(local)
            pairs.append((weakref.ref(ref.parameter), local))
    if pairs:  # for optimizers that were made over the DTensors
        module.__dict__[_LOCALISED] = pairs


def point_at_localised(optimizer: Optimizer, module: nn.Module) -> None:
    """Replace DTensor parameters in an optimizer made before by what stands for them."""
    pairs = [pair for child in module.modules() for pair in child.__dict__.get(_LOCALISED, ())]
    # By weak references: an `id` of a DTensor that is gone may be another tensor's by now.
    places = {id(old): new for reference, new in pairs if (old := reference()) is not None}
    for settings in optimizer.param_groups:
        for old in settings["params"]:
            if id(old) in places and old in optimizer.state:
                optimizer.state[places[id(old)]] = {
                    name: value.to_local() if hasattr(value, "to_local") else value
                    for name, value in optimizer.state.pop(old).items()
                }
        settings["params"] = [places.get(id(p), p) for p in settings["params"]]


class LocalisedParameters:
    """Parameters of a unit that modules see as DTensors in their forward."""

    def __init__(self, refs: Iterable[ParameterRef]) -> None:
        self._refs = tuple(refs)

    @classmethod
    def among(cls, refs: Iterable[ParameterRef]) -> "LocalisedParameters | None":
        """Those that were DTensors; None where there are none."""
        localised = [ref for ref in refs if _FORM in ref.parameter.__dict__]
        return cls(localised) if localised else None

    def show(self) -> None:
        """Let modules hold DTensors made of the (whole) compute parameters."""
        from torch.distributed.tensor import DTensor

        for ref in self._refs:
            form: _Form = ref.parameter.__dict__[_FORM]
            # Autograd records this: the gradient comes back to the local tensor.
            made = DTensor.from_local(
                ref.parameter,
                form.mesh,
                form.placements,
                run_check=False,
                shape=form.shape,
                stride=form.stride,
            )
            ref.install(made)  # type: ignore[arg-type]  # no leaf: it lives for one forward

    def hide(self) -> None:
        """Let modules hold the compute parameters again."""
        for ref in self._refs:
            ref.install(ref.parameter)


def take_form(parameter: nn.Parameter, other: nn.Parameter) -> None:
    """Let a parameter stand for the DTensor, if any, that another one of its shape stands for."""
    if _FORM in other.__dict__:
        parameter.__dict__[_FORM] = other.__dict__[_FORM]


def is_cut_dtensor(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a DTensor that other ranks hold other parts of."""
    return hasattr(parameter, "placements") and bool(_cut_dims(parameter))


def region_of_dtensor(parameter: torch.Tensor) -> TensorRegion | None:
    """Where a localised parameter lies in the DTensor it was; None for another, or a whole one."""
    form: _Form | None = parameter.__dict__.get(_FORM)
    if form is None:
        return None
    local, offset = local_shape_and_offset(form.shape, form.mesh, form.placements)
    if tuple(local) == tuple(form.shape):
        return None
    runs = tuple((Run(0, size, start),) for size, start in zip(local, offset, strict=True))
    return TensorRegion(tuple(form.shape), runs)


def _cut_dims(whole: Any) -> list[int]:
    return [
        placement.dim
        for placement, size in zip(whole.placements, whole.device_mesh.shape, strict=True)
        if not placement.is_replicate() and size > 1
    ]


def _local_of(ref: ParameterRef) -> nn.Parameter:
    whole: Any = ref.parameter
    if whole.is_meta:
        raise ValueError(
            f"{ref.name} is a DTensor on the meta device: its pieces have no initialisation of "
            "their own (fans and random numbers are those of the whole). Build the model with "
            "values before parallelize_module, or use Lamina's own tensor-parallel layers"
        )
    # A role names the one dimension that tp has cut.
    cut = _cut_dims(whole)
    if len(cut) > 1 or any(not (p.is_shard() or p.is_replicate()) for p in whole.placements):
        raise ValueError(
            f"{ref.name} is a DTensor with placements {tuple(whole.placements)}: fully_shard takes "
            "parameters that are replicated, or sharded along one tensor-parallel dimension, and "
            "cuts them again along the data-parallel axes itself"
        )
    local = nn.Parameter(whole.to_local().detach(), requires_grad=whole.requires_grad)
    # Marks of the user's come along, and so does what else a library has written on it.
    local.__dict__.update(whole.__dict__)
    if cut and ref.role.tp_shard_dim is None:
        mark(local, tp_shard_dim=cut[0])
    local.__dict__[_FORM] = _Form(
        whole.device_mesh, tuple(whole.placements), whole.shape, whole.stride()
    )
    return local
