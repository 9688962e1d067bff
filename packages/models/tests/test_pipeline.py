"""A pipeline of any schedule trains like one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    full_gradients,
)
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, TransformerConfig, pipeline

CONFIG = TransformerConfig(
    vocab_size=40,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    ffn_size=24,
    max_sequence_length=16,
    init_std=0.2,
)
SCHEDULES = {
    "gpipe": 4,
    "1f1b": 4,
    "interleaved_1f1b": 4,
    "looped_bfs": 4,
    "interleaved_zero_bubble": 4,
    "zbv_zero_bubble": 4,
    "dualpipev": 4,
}


def batch(step, rows=6):
    """Tokens, and labels of which each sequence has other numbers to be left out."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, 40, (rows, 9), generator=generator)
    labels = text[:, 1:].clone()
    for row in range(rows):
        labels[row, : (3 * row + step) % 8] = -100
    return text[:, :-1], labels


def wrapper(kind, mesh, **settings):
    """What makes a stage data-parallel; None leaves it bare."""
    if kind is None:
        return None
    if kind == "ddp":
        config = DistributedDataParallelConfig(overlap_grad_reduce=True, **settings)
        return lambda stage: DistributedDataParallel(stage, config, mesh)
    return lambda stage: fully_shard(stage, device_mesh=mesh, zero_dp_strategy=kind, **settings)


def optimizers(kind, runner, mesh):
    """One per stage where stages are sharded."""
    if kind is None:
        return [torch.optim.AdamW(runner.parameters(), 1e-2)]
    if kind == "ddp":
        adamw = torch.optim.AdamW(runner.parameters(), 1e-2)
        return [ShardedOptimizer(adamw, runner, mesh)]
    return [
        fully_shard_optimizer(torch.optim.AdamW(stage.parameters(), 1e-2), stage)
        for stage in runner.stages
    ]


def gradients(kind, runner):
    if kind is None:
        return {name: p.grad for name, p in runner.named_parameters() if p.grad is not None}
    return full_gradients(runner)


def check_training(runner, mesh, config, kind, steps=3, rows=6, per_token=False):
    """Train beside one process: losses, gradients of every step, so parameters too."""
    whole = GPTModel(config, seed=1).double()
    plain = torch.optim.AdamW(whole.parameters(), 1e-2)
    stepping = optimizers(kind, runner, mesh)
    dp = mesh.axis("dp")
    for step in range(steps):
        tokens, labels = batch(step, rows * dp.size)
        shares = list(zip(tokens.chunk(dp.size), labels.chunk(dp.size), strict=True))
        if per_token:
            whole(tokens, labels).backward()
        else:
            for mine in shares:
                (whole(*mine) / dp.size).backward()
        with torch.no_grad():
            wanted = whole(*shares[dp.rank])
        torch.testing.assert_close(runner.evaluate(*shares[dp.rank]), wanted, rtol=0, atol=1e-10)
        loss = runner.step(*shares[dp.rank])
        torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)
        expected = {name: p.grad for name, p in whole.named_parameters()}
        found = gradients(kind, runner)
        assert found.keys() <= expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
        for each in (plain, *stepping):
            each.step()
            each.zero_grad()
    return whole


def build(config, mesh):
    return GPTModel(config, mesh, seed=1).double()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_every_schedule_trains_bare_stages_like_one_process(schedule, ranks):
    config = replace(CONFIG, tie_embeddings=True)
    mesh = ParallelLayout(pp=2).build("cpu")
    runner = pipeline(build(config, mesh), mesh, schedule, SCHEDULES[schedule])
    check_training(runner, mesh, config, None)
