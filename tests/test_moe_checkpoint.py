"""Experts saved in one layout go on in another: weights, optimizer state and biases."""

from __future__ import annotations

import pytest
import torch

from lamina.checkpoint import CheckpointManager
from lamina.ddp import finalize_grads, full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import GPTModel, MoEConfig, TransformerConfig
from lamina.models.engine import cut_weight

CONFIG = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    sequence_parallel=True,
    moe=MoEConfig(num_experts=4, top_k=2, ffn_size=8, bias_rate=0.05, sequence_loss=0.1),
)


class Job:
    def __init__(self, axes, directory, seed):
        self.mesh = ParallelLayout(**axes).build("cpu")
        model = GPTModel(CONFIG, self.mesh, seed=seed).double()
        self.roles = {name: role_of(p) for name, p in model.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.model, self.optimizer = fully_shard(model, optimizer, device_mesh=self.mesh)
        self.manager = CheckpointManager(directory, mesh=self.mesh, progress=False)
        self.state = {"model": self.model, "optimizer": self.optimizer}

    def step(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (4, 9), generator=generator)
        dp = self.mesh.axis("dp")
        mine = tokens.chunk(dp.size)[dp.rank]
        self.model(mine[:, :-1], mine[:, 1:]).backward()
        finalize_grads(self.model, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def piece(self, name, whole):
        role = self.roles[name]
        axis = self.mesh.axis("expert_tp" if role.expert else "tp")
        if role.expert:
            ep = self.mesh.axis("ep")
            whole = whole.chunk(ep.size)[ep.rank]
        if role.tp_shard_dim is None:
            return whole
        return cut_weight(whole, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)


@pytest.mark.ranks(4, timeout=120)
def test_experts_go_on_in_another_layout(tmp_path):
    first = Job({"dp_shard": 4}, tmp_path, seed=1)
    for index in range(2):
        first.step(index)
    first.manager.save(2, first.state)
    first.step(2)
    wholes = full_parameters(first.model)
    bias = dict(first.model.named_buffers())["blocks.0.mlp.router.expert_bias"]
    chain = [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2, "expert_tp": 2}]
    for number, axes in enumerate(chain):
        other = Job(axes, tmp_path, seed=5)
        other.manager.restore(other.state, step=2 + 10 * number)
        other.manager.save(2 + 10 * (number + 1), other.state)  # the next one reads these pieces
        other.step(2)
        for name, found in full_parameters(other.model).items():
            expected = other.piece(name, wholes[name])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=f"{axes} {name}")
        assert torch.equal(
            dict(other.model.named_buffers())["blocks.0.mlp.router.expert_bias"], bias
        )
