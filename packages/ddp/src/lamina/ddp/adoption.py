"""Main weights that follow model weights: what was loaded or broadcast into the module."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lamina.buffers import Replicate
from lamina.collectives import broadcast
from lamina.ddp.group import ParameterGroup

__all__ = ["adopt_model_weights"]


def adopt_model_weights(group: ParameterGroup, indices: Iterable[int] | None = None) -> None:
    """Main weights take what the (whole) model weights hold: somebody wrote those.

    Args:
        group: the group; nothing has to be done where its main weights are part of the model's.
        indices: the parameters that were written; None means every element that no longer is its
            main weight, rounded, and on all ranks the first one's main weights (collective over
            axes along which they are whole).
    """
    if group.main is None or group.dtypes.main == group.dtypes.weights:
        return
    main, model = group.main.data, group.weights.local.piece(group.main.placement)
    if indices is not None:
        for start, stop in map(group.span_in_rest, indices):
            main[start:stop].copy_(model[start:stop])
        return
    main.copy_(torch.where(main.to(model.dtype) == model, main, model.to(main.dtype)))
    axes = (group.axes.outer, group.axes.inner)
    for placement, axis in zip(group.main.placement, axes, strict=True):
        if isinstance(placement, Replicate):
            broadcast(main, axis.sibling("gather"), src=0).wait()
