"""Checkpoints of parameters that tensor parallelism has cut: one tensor, whatever the mesh.

A tp rank's parameter is a region of the model's. `state_dict()` says which (`TensorPart`), so that
`torch.distributed.checkpoint` writes and reads the model's tensor, and loads take the region back.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lamina.buffers import ShardedTensor
from lamina.buffers.engine import TensorPart, TensorRegion
from lamina.ddp.engine import (
    DataParallelAxes,
    ModelAxes,
    ParameterGroup,
    ParameterRef,
    needs_whole_tensors,
)
from lamina.fsdp.units.dtensors import is_cut_dtensor, region_of_dtensor

_REGIONS = "_lamina_regions"


class TensorRegions:
    """Which region of the model's tensor each main parameter is, where it is not all of it.

    `axes` may have cut them. ValueError says that a parameter cannot be the piece that its mark and
    the mesh say.
    """

    def __init__(self, groups: Iterable[ParameterGroup], axes: ModelAxes) -> None:
        # With the parameter itself, whose `id` another one could have when it is gone.
        self._by_parameter: dict[int, tuple[torch.Tensor, TensorRegion]] = {}
        for group in groups:
            for ref, spec, main in zip(
                group.refs, group.layout.specs, group.main_parameters, strict=True
            ):
                region = _region_of(ref, spec.shape, axes)
                if region is not None:
                    self._by_parameter[id(main)] = main, region

    def __bool__(self) -> bool:
        return bool(self._by_parameter)

    def of(self, parameter: torch.Tensor) -> TensorRegion | None:
        """The region that a main parameter is; None for a whole one."""
        known, region = self._by_parameter.get(id(parameter), (None, None))
        return region if known is parameter else None

    def as_part(self, parameter: torch.Tensor, value: Any) -> Any:
        """A tensor of a main parameter's shape, as the part of the model's tensor that it is."""
        region = self.of(parameter)
        # Step counts, and what an optimizer keeps in shapes of its own, are no parts of anything.
        alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        if region is None or not alike or not value.dim():
            return value
        return TensorPart(value.detach(), region)

    def taken(self, parameter: torch.Tensor, value: Any) -> Any:
        """The inverse of `as_part`; of a plain tensor that is the model's, this rank's part."""
        if isinstance(value, TensorPart):
            return value.tensor()
        region = self.of(parameter)
        plain = isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor)
        if region is None or not plain or tuple(value.shape) != region.shape:
            return value
        # A plain tensor of the whole's shape: somebody loads what another system has saved.
        with torch.no_grad():
            part = TensorPart(torch.empty_like(parameter.detach(), dtype=value.dtype), region)
            return part.copy_(value).tensor()  # type: ignore[attr-defined]


def show_parts(module: nn.Module, regions: TensorRegions) -> None:
    """Let the `state_dict()` of a module hold, and `load_state_dict` take, `TensorPart`s."""
    module.__dict__[_REGIONS] = regions
    if not regions:
        return

    def changing(change: Callable[[torch.Tensor, Any], Any]) -> Callable[..., None]:
        """Make a hook that changes the values of parameters in a state."""

        def hook(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
            """Change those of the module's parameters that the state has."""
            for name, parameter in owner.named_parameters(remove_duplicate=False):
                if (key := prefix + name) in state:
                    state[key] = change(parameter, state[key])

        return hook

    save, load = changing(regions.as_part), changing(regions.taken)
    module.register_state_dict_post_hook(save)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(load)  # type: ignore[no-untyped-call]


def refuse_parts(
    refs: Iterable[ParameterRef], axes: ModelAxes, optimizer: Optimizer | None, *, whole: bool
) -> None:
    """Raise ValueError if ranks along `axes` hold parts of what has to be whole.

    The model is not sharded yet. Its `optimizer` may look at whole tensors. If `state_dict()` holds
    `whole` ones, these are put together over data-parallel ranks only: every rank would save its
    part under the name of the whole.
    """
    for ref in refs:
        shape = tuple(ref.parameter.shape)
        if not is_cut_dtensor(ref.parameter) and _region_of(ref, shape, axes) is None:
            continue
        if optimizer is not None:
            refuse_looking_at_part(optimizer, ref.name, ref.parameter)
        if whole:
            raise ValueError(
                f"preproc_state_dict_for_dcp_ckpt=False: {ref.name} of shape {list(shape)} is cut "
                "by tensor or expert parallelism, and state_dict() would hold this rank's part of "
                "it under the name of the whole. Leave the argument out, and save with "
                "torch.distributed.checkpoint"
            )


def refuse_looking_at_part(optimizer: Optimizer, name: str, *parameters: torch.Tensor) -> None:
    """Raise ValueError if an optimizer that looks at whole tensors holds this part of one."""
    if not needs_whole_tensors(optimizer).isdisjoint(map(id, parameters)):
        raise ValueError(
            f"{type(optimizer).__name__} looks at whole tensors, and {name} is cut over "
            "tensor-parallel ranks: give it another optimizer"
        )


def regions_of(module: nn.Module) -> tuple[TensorRegions, ...]:
    """What `show_parts` was given for a module and those inside it."""
    shown = (child.__dict__.get(_REGIONS) for child in module.modules())
    return tuple(dict.fromkeys(regions for regions in shown if regions))


def _region_of(ref: ParameterRef, shape: tuple[int, ...], axes: ModelAxes) -> TensorRegion | None:
    # A DTensor has said itself what it is a part of; otherwise the role and the mesh do.
    region = region_of_dtensor(ref.parameter)
    if region is not None:
        return region
    tensor = axes.expert_tp if ref.role.expert else axes.tp
    try:
        return TensorRegion.of_part(shape, ref.role, tensor, axes.ep)
    except ValueError as error:
        raise ValueError(
            f"{ref.name} is marked {ref.role} and lies on {error}. Say which axis has cut it with "
            "tp_dim="
        ) from error


def beside_parts(
    axes: DataParallelAxes, refs: Iterable[ParameterRef], model: ModelAxes
) -> DataParallelAxes:
    """The same data-parallel axes, and which of the axes `model` cut the parameters too."""
    apart = tuple(dict.fromkeys(_apart(axes, refs, model)))
    if not apart:
        return axes
    outer, inner = (replace(axis, apart=apart) for axis in (axes.outer, axes.inner))
    return replace(axes, outer=outer, inner=inner)


def _apart(axes: DataParallelAxes, refs: Iterable[ParameterRef], model: ModelAxes) -> Iterable[str]:
    # Stages of a pipeline always hold other tensors. The other axes cut them only if one says so.
    yield from (name for name in axes.apart if name == "pp")
    for ref in refs:
        if is_cut_dtensor(ref.parameter) or region_of_dtensor(ref.parameter) is not None:
            yield "tp" if model.tp is None else model.tp.name
        cuts = [model.ep] if ref.role.expert else []
        if ref.role.tp_shard_dim is not None:
            cuts.append(model.expert_tp if ref.role.expert else model.tp)
        yield from (axis.name for axis in cuts if axis is not None and axis.size > 1)
