"""What changes for a unit that was sharded alone when it becomes part of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from lamina.buffers import BufferLayout
from lamina.ddp import ParameterGroup, TransientBuffers

__all__ = ["SharedBuffers", "rename"]


class SharedBuffers(TransientBuffers):
    """Buffers of one unit until the engine is made, then those of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.shared: TransientBuffers | None = None

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As of `TransientBuffers`."""
        shared = self.shared
        own = super().take
        return (own if shared is None else shared.take)(numel, dtype, device)

    def give(self, tensor: torch.Tensor) -> None:
        """As of `TransientBuffers`."""
        (super().give if self.shared is None else self.shared.give)(tensor)

    def clear(self) -> None:
        """As of `TransientBuffers`."""
        (super().clear if self.shared is None else self.shared.clear)()


def rename(group: ParameterGroup, members: Mapping[int, str]) -> None:
    """Give a group's parameters their names in the whole model, which were not known before.

    Args:
        group: the group; of a list of modules, its names begin with the module's number.
        members: the path of each module of its unit.
    """

    def whole(name: str) -> str:
        path = members.get(0, "")
        if len(members) > 1:
            number, name = name.split(".", 1)
            path = members[int(number)]
        return f"{path}.{name}" if path else name

    group.refs = tuple(replace(ref, name=whole(ref.name)) for ref in group.refs)
    specs = [replace(spec, name=whole(spec.name)) for spec in group.layout.specs]
    settings = group.settings
    layout = BufferLayout.plan(specs, group.axes.size, settings.alignment, settings.shard_multiple)
    group.layout = group.weights.local.layout = layout
    if group.main is not None:
        group.main.layout = layout
    if group.gradients is not None:
        group.gradients.layout = group.gradients.main.layout = layout
