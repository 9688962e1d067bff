"""Hybrid stacks over ranks train like one process: tensor parallelism, and fully_shard."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    finalize_grads,
    full_parameters,
)
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    AttentionBlock,
    GPTModel,
    MambaBlock,
    MambaConfig,
    MLPBlock,
    TransformerConfig,
    apply_recompute,
)
from lamina.models.engine import join_weight
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    ffn_size=24,
    max_sequence_length=32,
    layer_pattern="M*M-",
    mamba=MambaConfig(state_size=8, head_dim=4, groups=2, chunk_size=8, bias=True),
)


def batch(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(0, 64, (4, 17), generator=generator)
    ids = torch.arange(16).expand(4, 16) // torch.tensor([[5], [16], [7], [3]])
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:], "document_ids": ids}


def slice_of(data: dict[str, torch.Tensor], rank: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value.chunk(size)[rank] for name, value in data.items()}


def train(whole, model, optimizer, mesh, steps):
    """Step both, the first on whole batches, the second on this rank's share of them."""
    plain = torch.optim.AdamW(whole.parameters(), 3e-3)
    dp = mesh.axis("dp")
    for step in range(steps):
        data = batch(step)
        whole(**data).backward()
        parts = [slice_of(data, rank, dp.size) for rank in range(dp.size)]
        counts = [(part["labels"] != -100).sum() for part in parts]
        assert len(set(map(int, counts))) == 1  # a mean of means is the mean
        model(**parts[dp.rank]).backward()
        finalize_grads(model, mesh)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_cut_over_ranks_train_like_one_process(sequence_parallel, recompute):
    mesh = ParallelLayout(tp=2).build(device_type())
    config = replace(CONFIG, sequence_parallel=sequence_parallel)
    whole = GPTModel(config, seed=1).double()
    model = apply_recompute(GPTModel(config, mesh, seed=1).double(), recompute)
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    for name in ("A_log", "D", "dt_bias", "conv.weight", "conv.bias", "norm.weight"):
        parts = [role for key, role in roles.items() if f"blocks.0.mixer.{name}" in key or
                 key.endswith(f"blocks.0.mixer.scan.{name}")]  # fmt: skip
        assert parts[0].tp_shard_dim == 0, f"{name} is held whole"
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=0)
    train(whole, model, optimizer, mesh, 4)
    compare(model, whole, roles, mesh)


def compare(model, whole, roles, mesh):
    """Parameters, those that are cut over tp joined."""
    wholes, group = dict(whole.named_parameters()), mesh.axis("tp").group
    for name, piece in full_parameters(model).items():
        role, expected = roles[name], wholes[name].detach()
        if role.tp_shard_dim is not None:
            pieces = [torch.empty_like(piece) for _ in range(2)]
            torch.distributed.all_gather(pieces, piece.contiguous(), group)
            piece = join_weight(pieces, role.tp_shard_dim, role.tp_blocks)
        torch.testing.assert_close(
            piece, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("strategy", [pytest.param(1, marks=pytest.mark.slow), 3, "ddp, sharded"])
def test_heads_and_states_cut_over_ranks_train_like_one_process(strategy):
    """tp 2 x dp_shard 2: what tp has cut is sharded once more."""
    mesh = ParallelLayout(dp_shard=2, tp=2).build(device_type())
    config = replace(CONFIG, sequence_parallel=True)
    whole = GPTModel(config, seed=1).double()
    model = GPTModel(config, mesh, seed=1).double()
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    if strategy == "ddp, sharded":
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        model = DistributedDataParallel(model, settings, mesh)
        optimizer = ShardedOptimizer(optimizer, model, mesh)
    else:
        units = [MambaBlock, AttentionBlock, MLPBlock]
        model, optimizer = fully_shard(
            model, optimizer, device_mesh=mesh, zero_dp_strategy=strategy, fsdp_unit_modules=units
        )
    train(whole, model, optimizer, mesh, 3)
    compare(model, whole, roles, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_every_strategy_trains_a_hybrid_like_one_process(strategy):
    mesh = ParallelLayout().build(device_type())
    whole = GPTModel(CONFIG, seed=1).double()
    with torch.device("meta" if strategy == 3 else "cpu"):
        model = GPTModel(CONFIG, seed=1).double()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[MambaBlock, AttentionBlock, MLPBlock],
    )
    train(whole, model, optimizer, mesh, 3)
    found = full_parameters(model)
    for name, expected in whole.named_parameters():
        torch.testing.assert_close(
            found[name], expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, n=name: n + m
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axes", "change", "message"),
    [
        ({"tp": 2}, {"groups": 1}, "Mamba groups 1 is not divisible by tp 2"),
        ({"tp": 2}, {"groups": 1, "num_heads": 3}, "Mamba heads 3 is not divisible by tp 2"),
        ({"cp": 2}, {}, "whose state runs through the whole sequence, and cp 2 cuts it"),
    ],
)
def test_what_ranks_cannot_share_is_refused(axes, change, message):
    mesh = ParallelLayout(**axes).build(device_type())
    config = replace(CONFIG, mamba=replace(CONFIG.mamba, **change))
    with pytest.raises(ValueError, match=message):
        GPTModel(config, mesh)
