"""torch's own parallel parts run on Lamina's meshes, whose groups torch did not make."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lamina.mesh import ParallelLayout
from lamina.mesh.engine import DENSE_AXES
from lamina_testing import device_type


@pytest.mark.ranks(4)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "dp_replicate": 2}, {"dp_replicate": 2}])
def test_fsdp2_with_tensor_parallelism_matches_one_process(sizes: dict[str, int]) -> None:
    mesh = ParallelLayout(**sizes).build(device_type())
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    cut = copy.deepcopy(whole)
    if mesh.layout.tp > 1:
        parallelize_module(cut, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicated = mesh.layout.dp_replicate > 1
    fully_shard(cut, mesh=mesh["dp_replicate", "dp_shard"] if replicated else mesh["dp_shard"])
    batch = torch.randn(4, 2, 8)
    own = batch.chunk(mesh.axis("dp").size)[mesh.axis("dp").rank]
    cut(own).square().mean().backward()
    whole(batch).square().mean().backward()
    for parameter, expected in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


@pytest.mark.ranks(4)
def test_dtensors_live_on_single_whole_and_derived_meshes() -> None:
    mesh = ParallelLayout(cp=2, tp=2).build(device_type())
    values = torch.arange(8.0)
    for name in ("tp", "dp_cp", "dp_shard_cp", "dp_shard", "ep", "expert_dp"):
        assert torch.equal(distribute_tensor(values, mesh[name], [Shard(0)]).full_tensor(), values)
    for name in DENSE_AXES:
        placements = [Shard(0) if dim == name else Replicate() for dim in DENSE_AXES]
        assert torch.equal(distribute_tensor(values, mesh.mesh, placements).full_tensor(), values)
