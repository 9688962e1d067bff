"""Models under ``fully_shard`` on meshes of several axes train like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import finalize_grads, full_parameters
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import GPTModel, TransformerConfig, apply_recompute
from lamina.models.engine import cut_weight
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    max_sequence_length=32,
    qk_norm=True,
    sequence_parallel=True,
)
CASES = {
    "tp, units gathered": ({"dp_shard": 2, "tp": 2}, 3, "none", False),
    "tp, whole, tied": ({"dp_shard": 2, "tp": 2}, 0, "none", True),
    "tp, tied, blocks run again": ({"dp_shard": 2, "tp": 2}, 3, "full", True),
    "tp, outputs run again": ({"dp_shard": 2, "tp": 2}, 3, "selective", False),
    "cp and tp": ({"cp": 2, "tp": 2}, 3, "selective", True),
    "cp": ({"dp_shard": 2, "cp": 2}, 3, "none", False),
    "cp, whole": ({"dp_shard": 2, "cp": 2}, 0, "full", False),
}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 64, (4, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.matrix(few=3)
@pytest.mark.ranks(4, timeout=120)
@pytest.mark.parametrize("case", list(CASES))
def test_training_equals_one_process(case):
    axes, strategy, recompute, tied = CASES[case]
    mesh = ParallelLayout(**axes).build(device_type())
    config = replace(CONFIG, tie_embeddings=tied)
    whole = GPTModel(config, seed=1).double()
    model = apply_recompute(GPTModel(config, mesh, seed=1).double(), recompute)
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy)
    plain = torch.optim.AdamW(whole.parameters(), 1e-3)
    dp, tp = mesh.axis("dp"), mesh.axis("tp")
    for step in range(3):
        tokens, labels = batch(step)
        whole(tokens, labels).backward()
        model(tokens.chunk(dp.size)[dp.rank], labels.chunk(dp.size)[dp.rank]).backward()
        finalize_grads(model, mesh)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    parameters = full_parameters(model)
    for name, expected in whole.named_parameters():
        role, found = roles[name], parameters[name]
        if role.tp_shard_dim is not None and found.shape != expected.shape:
            expected = cut_weight(expected, role.tp_shard_dim, tp.rank, tp.size, role.tp_blocks)
        torch.testing.assert_close(
            found, expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )
