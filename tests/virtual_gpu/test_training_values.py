"""On the virtual GPU every strategy trains, in any order, with the bits of PyTorch on a CPU."""

from __future__ import annotations

import pytest

PROGRAM = """
    import json, os, torch, torch.distributed as dist
    import torch.nn as nn, torch.nn.functional as F
    from lamina.ddp import full_parameters
    from lamina.fsdp import fully_shard
    from lamina.mesh import ParallelLayout

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.norm = nn.Linear(32, 96), nn.Linear(32, 32), nn.LayerNorm(32)

        def forward(self, x):
            parts = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
            return x + self.out(F.gelu(mixed.transpose(1, 2).flatten(-2)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(50, 32), nn.Linear(32, 50)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, tokens):
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    def train(device, strategy=None):
        torch.manual_seed(0)
        model = Model().to(device)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if strategy is not None:
            model, adamw = fully_shard(
                model, adamw, device_mesh=ParallelLayout().build("cuda"),
                fsdp_unit_modules=[Block], zero_dp_strategy=strategy)
        numbers = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(0, 50, (2, 16), generator=numbers).to(device)
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
            loss.backward()
            adamw.step()
            adamw.zero_grad()
        named = dict(model.named_parameters()) if strategy is None else full_parameters(model)
        return {name: value.detach().cpu().clone() for name, value in named.items()}

    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1,
                            device_id=torch.device("cuda", 0))
    wanted = train("cpu")
    wrong = []
    for strategy in range(4):
        found = train("cuda", strategy)
        wrong += [(strategy, name) for name in wanted if not torch.equal(found[name], wanted[name])]
    print(json.dumps(wrong), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("order", "seed"), [("at-once", 0), ("late", 0), *(("adversarial", seed) for seed in range(3))]
)
def test_all_strategies_equal_plain_pytorch_on_a_cpu(on_rank_0, order, seed):
    assert on_rank_0(PROGRAM, VGPU_COMPUTE=order, VGPU_SEED=seed) == []
