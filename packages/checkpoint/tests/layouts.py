"""One small GPT on every kind of mesh, for tests that move it from one to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, ParallelMesh, mesh_axis
from lamina.models import GPTModel, PipelineRunner, TransformerBlock, TransformerConfig, pipeline

CONFIG = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=32,
    max_sequence_length=16,
    context_parallel="all_gather",
)
BATCH, STEPS = 4, 2


@dataclass(frozen=True)
class Layout:
    """How four ranks share the model."""

    mesh: dict[str, int] = field(default_factory=dict)
    sharding: dict[str, Any] | None = None  # None: bare modules, every rank the whole batch


LAYOUTS = {
    "bare": Layout(),
    "0": Layout({"dp_shard": 4}, {"zero_dp_strategy": 0}),
    "1": Layout({"dp_shard": 4}, {"zero_dp_strategy": 1}),
    "2": Layout({"dp_shard": 4}, {"zero_dp_strategy": 2}),
    "3": Layout({"dp_shard": 4}, {"zero_dp_strategy": 3}),
    "hsdp": Layout({"dp_replicate": 2, "dp_shard": 2}, {"outer_dp_sharding_strategy": 0}),
    "hfsdp": Layout({"dp_replicate": 2, "dp_shard": 2}, {"outer_dp_sharding_strategy": 1}),
    "tp": Layout({"tp": 2, "dp_shard": 2}, {}),
    "tp bare": Layout({"tp": 2, "dp_shard": 2}, None),
    "cp": Layout({"cp": 2, "dp_shard": 2}, {}),
    "pp": Layout({"pp": 2, "dp_shard": 2}, None),
}


@dataclass
class Job:
    """A model on its layout, ready to train."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    share: slice

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    # SGD: AdamW amplifies the rounding of gradients that are truly zero (a key's bias).
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def build(name: str, seed: int) -> Job:
    layout = LAYOUTS[name]
    if not layout.mesh:
        model: torch.nn.Module = GPTModel(CONFIG, seed=seed)
        return Job(model, sgd(model), slice(0, BATCH))
    sizes = {"dp_shard": 1, **layout.mesh}
    mesh = ParallelLayout(**sizes).build("cpu")
    model = GPTModel(CONFIG, mesh, seed=seed)
    if "pp" in sizes:
        return pipelined(model, mesh)
    optimizer = sgd(model)
    if layout.sharding is None:
        return Job(model, optimizer, slice(0, BATCH))
    options = {"dp_outer_dim": "dp_replicate"} if "dp_replicate" in sizes else {}
    model, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=mesh,
        fsdp_unit_modules=[TransformerBlock],
        **options,
        **layout.sharding,
    )
    return Job(model, optimizer, share_of(mesh))


def share_of(mesh: ParallelMesh) -> slice:
    dp = mesh_axis(mesh, ("dp_replicate", "dp_shard"))
    share = BATCH // dp.size
    return slice(dp.rank * share, (dp.rank + 1) * share)


def pipelined(model: GPTModel, mesh: ParallelMesh) -> Job:
    runner = pipeline(
        model,
        mesh,
        "1f1b",
        num_microbatches=2,
        wrap=lambda stage: fully_shard(stage, device_mesh=mesh),
    )
    optimizer = sgd(runner)
    for stage in runner.stages:
        fully_shard_optimizer(optimizer, stage)
    return Job(runner, optimizer, share_of(mesh))


def train(job: Job, first: int) -> None:
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (BATCH, 17), generator=generator)[job.share]
        if isinstance(job.model, PipelineRunner):
            job.model.step(tokens[:, :-1], tokens[:, 1:])
        else:
            job.model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
