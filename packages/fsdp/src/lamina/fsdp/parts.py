"""Data-parallel axes that know which other axes cut the model, so that norms of parts are refused.

What is cut over data-parallel ranks finds its norm over these. Where tp, ep or pp has cut the model
too, that is the norm of one rank's part of the model, and `torch.nn.utils.clip_grad_norm_` would
clip each part by its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

from torch.distributed import ProcessGroup

from lamina.ddp import DataParallelAxes, ParameterRef
from lamina.fsdp.meshes import ModelAxes
from lamina.fsdp.tensor_parallel import is_cut_dtensor, region_of_dtensor
from lamina.mesh import MeshAxis

__all__ = ["beside_parts"]


@dataclass(frozen=True)
class _BesideParts(MeshAxis):
    """A data-parallel axis of a model that is cut along others as well.

    `lamina.buffers` reads `apart`, their names, when it is asked for a norm of many tensors.
    """

    apart: tuple[str, ...] = ()
    plain: MeshAxis | None = field(default=None, repr=False, compare=False)

    def sibling(self, purpose: str) -> ProcessGroup | None:
        """As of the axis itself."""
        return super().sibling(purpose) if self.plain is None else self.plain.sibling(purpose)


def beside_parts(
    axes: DataParallelAxes, refs: Iterable[ParameterRef], model: ModelAxes
) -> DataParallelAxes:
    """The same axes, and which others cut the model whose parameters these are.

    Args:
        axes: data-parallel axes.
        refs: the model's parameters.
        model: the axes that may have cut them.
    """
    apart = tuple(dict.fromkeys(_apart(axes, refs, model)))
    if not apart:
        return axes
    return replace(axes, outer=_marked(axes.outer, apart), inner=_marked(axes.inner, apart))


def _apart(axes: DataParallelAxes, refs: Iterable[ParameterRef], model: ModelAxes) -> Iterable[str]:
    yield from (name for name in axes.apart if name == "pp")
    for ref in refs:
        if is_cut_dtensor(ref.parameter) or region_of_dtensor(ref.parameter) is not None:
            yield "tp" if model.tp is None else model.tp.name
        cuts = [model.ep] if ref.role.expert else []
        if ref.role.tp_shard_dim is not None:
            cuts.append(model.expert_tp if ref.role.expert else model.tp)
        yield from (axis.name for axis in cuts if axis is not None and axis.size > 1)


def _marked(axis: MeshAxis, apart: tuple[str, ...]) -> MeshAxis:
    own = {each.name: getattr(axis, each.name) for each in fields(MeshAxis)}
    return _BesideParts(**own, apart=apart, plain=axis)
