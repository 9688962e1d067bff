"""Gradient scalers: all ranks of a mesh skip a step, or none."""

import pytest
import torch
from torch import nn

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedGradScaler,
    ShardedOptimizer,
)
from lamina.mesh import ParallelLayout, mark
from lamina_testing import device_type


class OneOverflow(nn.Module):
    """One element of one rank's gradient overflows when told to."""

    def __init__(self, axis):
        super().__init__()
        self.piece = nn.Parameter(torch.ones(64))
        self.spare = nn.Parameter(torch.ones(64))  # with two buckets: of the other rank's shard
        if axis in ("tp", "expert_tp"):
            mark(self.piece, tp_shard_dim=0, expert=axis == "expert_tp")

    def forward(self, factor):
        scales = torch.ones(64)
        scales[40] = factor
        return (self.piece * scales).sum() + self.spare.sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("axis", ["dp_shard", "tp", "pp", "expert_tp"])
def test_one_overflow_anywhere_skips_the_step_everywhere(axis, sharded, ranks):
    mesh = ParallelLayout(**{axis: 2}).build(device_type())  # with expert_tp, dp_shard is 2 as well
    model = OneOverflow(axis)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, bucket_size=1)
    wrapped = DistributedDataParallel(model, config, mesh)
    optimizer = ShardedOptimizer(optimizer, wrapped, mesh)
    plain = torch.amp.GradScaler(device_type(), init_scale=2.0**10)
    scaler = plain if axis == "dp_shard" else ShardedGradScaler(mesh, init_scale=2.0**10)
    if axis != "dp_shard":
        plain.scale(wrapped(1.0)).backward()
        with pytest.raises(RuntimeError, match=r"ShardedGradScaler\(mesh\)"):
            plain.step(optimizer)
        optimizer.zero_grad()
    for factor, stepped, scale in ((1e38, 0, 2.0**9), (1.0, 1, 2.0**9)):
        scaler.scale(wrapped(factor if ranks.rank == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == scale
        state = optimizer.state_dict()["state"]
        assert [float(one["step"]) for one in state.values()] == [1.0, 1.0] * stepped
