"""A span as a torch DTensor, where the two cuts agree."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from .span_spec import SpanSpec

__all__ = ["to_dtensor"]


def to_dtensor(
    local: torch.Tensor,
    spec: SpanSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    raise NotImplementedError
