"""Small GPTs on every kind of mesh, for tests that move them from one to another."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lamina.checkpoint import JoinedOptimizers
from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    finalize_grads,
)
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, ParallelMesh
from lamina.mesh.engine import mesh_axis
from lamina.models import (
    AttentionBlock,
    GPTModel,
    MambaBlock,
    MambaConfig,
    MLPBlock,
    MoEConfig,
    PipelineRunner,
    TopKRouter,
    TransformerBlock,
    TransformerConfig,
    pipeline,
)
from lamina_testing import device_type

_DENSE = TransformerConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=32,
    max_sequence_length=16,
    context_parallel="all_gather",
)
CONFIGS = {
    "dense": _DENSE,
    "tied": replace(_DENSE, tie_embeddings=True, num_layers=4),
    "experts": replace(
        _DENSE,
        sequence_parallel=True,
        moe=MoEConfig(num_experts=4, top_k=2, ffn_size=8, bias_rate=0.05, shared_ffn_size=8),
    ),
    "mamba": replace(
        _DENSE,
        num_layers=4,
        layer_pattern="M*M-",
        mamba=MambaConfig(state_size=8, head_dim=4, groups=2, chunk_size=8, bias=True),
    ),
}
BATCH, STEPS = 4, 2
FSDP, DDP, BARE = "fully_shard", "ddp", "bare"


@dataclass(frozen=True)
class Layout:
    """How four ranks share a model; bare ones see the whole batch on every rank."""

    mesh: dict[str, int] = field(default_factory=dict)
    engine: str = FSDP
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "dense"
    schedule: Any = "1f1b"
    joined: bool = False  # every stage has an optimizer of its own


_PAIR = {"dp_shard": 2}
_ZERO1 = {"use_distributed_optimizer": True}
_EXPERTS = {"model": "experts"}
_EP = {"dp_shard": 4, "ep": 2}
_EP_TWICE = {"dp_replicate": 2, **_PAIR, "ep": 2}
_UNITS = [TransformerBlock, MambaBlock, AttentionBlock, MLPBlock]
LAYOUTS = {
    "bare": Layout(engine=BARE),
    "0": Layout({"dp_shard": 4}, settings={"zero_dp_strategy": 0}),
    "1": Layout({"dp_shard": 4}, settings={"zero_dp_strategy": 1}),
    "2": Layout({"dp_shard": 4}, settings={"zero_dp_strategy": 2}),
    "3": Layout({"dp_shard": 4}),
    "hsdp": Layout({"dp_replicate": 2, **_PAIR}, settings={"outer_dp_sharding_strategy": 0}),
    "hfsdp": Layout({"dp_replicate": 2, **_PAIR}, settings={"outer_dp_sharding_strategy": 1}),
    "hsdp tp": Layout({"dp_replicate": 2, "tp": 2}),
    "ddp 0": Layout({"dp_shard": 4}, DDP),
    "ddp 1": Layout({"dp_shard": 4}, DDP, _ZERO1),
    "ddp 0 tp": Layout({"tp": 2, **_PAIR}, DDP),
    "ddp 1 tp": Layout({"tp": 2, **_PAIR}, DDP, _ZERO1),
    "tp": Layout({"tp": 2, **_PAIR}),
    "tp bare": Layout({"tp": 2, **_PAIR}, BARE),
    "cp": Layout({"cp": 2, **_PAIR}),
    "pp": Layout({"pp": 2, **_PAIR}),
    "tp pp": Layout({"tp": 2, "pp": 2}),
    "experts bare": Layout(engine=BARE, **_EXPERTS),
    "experts 3": Layout({"dp_shard": 4}, **_EXPERTS),
    "ep": Layout(_EP, **_EXPERTS),
    "ep 0": Layout(_EP, settings={"zero_dp_strategy": 0}, **_EXPERTS),
    "ep 1": Layout(_EP, settings={"zero_dp_strategy": 1}, **_EXPERTS),
    "ep 2": Layout(_EP, settings={"zero_dp_strategy": 2}, **_EXPERTS),
    "ep hsdp": Layout(_EP_TWICE, settings={"outer_dp_sharding_strategy": 0}, **_EXPERTS),
    "ep hfsdp": Layout(_EP_TWICE, settings={"outer_dp_sharding_strategy": 1}, **_EXPERTS),
    "ep tp": Layout({"tp": 2, **_PAIR, "ep": 2, "expert_tp": 2}, **_EXPERTS),
    "ep pp": Layout({"pp": 2, **_PAIR, "ep": 2}, **_EXPERTS),
    "ep ddp 0": Layout(_EP, DDP, **_EXPERTS),
    "ep ddp 1": Layout(_EP, DDP, _ZERO1, **_EXPERTS),
    "mamba bare": Layout(engine=BARE, model="mamba"),
    "mamba tp": Layout({"tp": 2, **_PAIR}, model="mamba"),
    "tied bare": Layout(engine=BARE, model="tied"),
    "tied 3": Layout({"dp_shard": 4}, model="tied"),
    "tied pp": Layout({"pp": 2, **_PAIR}, model="tied"),
    "tied zbv": Layout(
        {"pp": 2, "tp": 2}, BARE, model="tied", schedule="zbv_zero_bubble", joined=True
    ),
    "tied zbv one": Layout({"pp": 2, "tp": 2}, BARE, model="tied", schedule="zbv_zero_bubble"),
    "tied zbv ddp": Layout(
        {"pp": 2, "tp": 2}, DDP, _ZERO1, model="tied", schedule="zbv_zero_bubble"
    ),
}


@dataclass
class Job:
    """A model on its layout, ready to train."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    share: slice
    mesh: ParallelMesh | None = None

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    # In fp64: in fp32 AdamW amplifies the rounding of gradients that are truly zero (a key's bias).
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


class OfStages(JoinedOptimizers):
    """An optimizer per stage, stepped together."""

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def build(name: str, seed: int) -> Job:
    layout = LAYOUTS[name]
    config = CONFIGS[layout.model]
    everything = slice(0, BATCH)
    if not layout.mesh:
        model: torch.nn.Module = GPTModel(config, seed=seed).double()
        return Job(model, adamw(model), everything)
    mesh = ParallelLayout(**{"dp_shard": 1, **layout.mesh}).build(device_type())
    whole = GPTModel(config, mesh, seed=seed).double()
    share = everything if layout.engine == BARE else share_of(mesh)
    if "pp" in layout.mesh:
        return Job(*pipelined(whole, layout, mesh), share, mesh)
    if layout.engine == BARE:
        return Job(whole, adamw(whole), share)
    return Job(*wrapped(whole, layout, mesh), share, mesh)


def wrapped(
    model: torch.nn.Module, layout: Layout, mesh: ParallelMesh
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    if layout.engine == DDP:
        ddp = DistributedDataParallel(model, DistributedDataParallelConfig(**layout.settings), mesh)
        plain = adamw(ddp)
        return ddp, ShardedOptimizer(plain, ddp, mesh) if layout.settings else plain
    options = {"dp_outer_dim": "dp_replicate"} if "dp_replicate" in layout.mesh else {}
    return fully_shard(
        model,
        adamw(model),
        device_mesh=mesh,
        fsdp_unit_modules=_UNITS,
        **options,
        **layout.settings,
    )


def pipelined(
    model: GPTModel, layout: Layout, mesh: ParallelMesh
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = DistributedDataParallelConfig(**layout.settings if layout.engine == DDP else {})
    wraps = {
        BARE: None,
        DDP: lambda stage: DistributedDataParallel(stage, config, mesh),
        FSDP: lambda stage: fully_shard(stage, device_mesh=mesh),
    }
    number = 2 if layout.schedule == "1f1b" else 4
    runner = pipeline(
        model, mesh, layout.schedule, num_microbatches=number, wrap=wraps[layout.engine]
    )
    if layout.joined:
        return runner, OfStages([adamw(stage) for stage in runner.stages])
    optimizer = adamw(runner)
    if layout.engine == DDP:
        return runner, ShardedOptimizer(optimizer, runner, mesh)
    for stage in runner.stages if layout.engine == FSDP else ():
        fully_shard_optimizer(optimizer, stage)
    return runner, optimizer


def share_of(mesh: ParallelMesh) -> slice:
    dp = mesh_axis(mesh, ("dp_replicate", "dp_shard"))
    share = BATCH // dp.size
    return slice(dp.rank * share, (dp.rank + 1) * share)


def end_step(job: Job) -> None:
    """Reduce what only a mesh has, and move the biases of routers."""
    if job.mesh is not None:
        finalize_grads(job.model, job.mesh)
        return
    for module in job.model.modules():
        if isinstance(module, TopKRouter):
            module.finalize_step(None)


def train(job: Job, first: int) -> None:
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(64, (BATCH, 17), generator=generator)[job.share]
        if isinstance(job.model, PipelineRunner):
            job.model.step(tokens[:, :-1], tokens[:, 1:])
        else:
            job.model(tokens[:, :-1], labels=tokens[:, 1:]).backward()
            end_step(job)
        job.optimizer.step()
        job.optimizer.zero_grad()
