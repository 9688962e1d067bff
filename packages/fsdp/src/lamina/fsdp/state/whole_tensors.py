"""Optimizers that look at whole tensors: no shard boundary may cut what they update."""

from collections.abc import Iterable, Sequence

import torch
from torch.optim import Optimizer

from lamina.buffers import ShardedTensor
from lamina.ddp.engine import ModelAxes, ParameterGroup, ParameterRef
from lamina.fsdp.state.cut_regions import TensorRegions, parts_among

__all__ = ["needs_whole_tensors", "refuse_cut_by_model", "refuse_cut_tensors"]

WHOLE: tuple[type[Optimizer], ...] = (torch.optim.Adafactor, torch.optim.Muon)
"""Torch's optimizers whose update of an element reads others of its tensor."""


def needs_whole_tensors(optimizer: Optimizer | None) -> frozenset[int]:
    """`id`s of the parameters that an optimizer has to see whole."""
    if not isinstance(optimizer, WHOLE):
        return frozenset()
    return frozenset(id(p) for group in optimizer.param_groups for p in group["params"])


def refuse_cut_by_model(
    optimizer: Optimizer, refs: Iterable[ParameterRef], axes: ModelAxes
) -> None:
    """Refuse such an optimizer, before a model is sharded, where tensor parallelism has cut it.

    Args:
        optimizer: any.
        refs: the model's parameters.
        axes: that may have cut them.

    Raises:
        ValueError: naming the first such parameter.
    """
    wanted = needs_whole_tensors(optimizer)
    for ref in parts_among((ref for ref in refs if id(ref.parameter) in wanted), axes):
        raise ValueError(_cut_over_tp(optimizer, ref.name))


def _cut_over_tp(optimizer: Optimizer, name: str) -> str:
    return (
        f"{type(optimizer).__name__} looks at whole tensors, and {name} is cut over "
        "tensor-parallel ranks: give it another optimizer"
    )


def refuse_cut_tensors(
    optimizer: Optimizer, groups: Iterable[ParameterGroup], regions: Sequence[TensorRegions]
) -> None:
    """Refuse an optimizer that looks at whole tensors where they are cut.

    Args:
        optimizer: any.
        groups: the model's groups.
        regions: what tensor parallelism has cut.

    Raises:
        ValueError: naming the first such parameter.
    """
    wanted = needs_whole_tensors(optimizer)
    for group in groups if wanted else ():
        for index, (ref, main) in enumerate(zip(group.refs, group.main_parameters, strict=True)):
            if not wanted & {id(main), id(ref.parameter)}:
                continue
            if any(one.of(main) is not None for one in regions):
                raise ValueError(_cut_over_tp(optimizer, ref.name))
            # From the layout, and not from this rank's piece: all ranks must agree.
            if isinstance(main, ShardedTensor) and all(
                stop - start < main.numel()
                for start, stop in group.main_weights.as_sharded(index).extents()
            ):
                raise ValueError(
                    f"{type(optimizer).__name__} looks at whole tensors, and {ref.name} is cut "
                    f"over data-parallel ranks ({group.axes.describe()}): give the optimizer to "
                    "fully_shard(model, optimizer), which keeps its tensors whole, or "
                    "mark(parameter, block_rows=rows) before sharding"
                )
