"""Training of `invariant=True` on any layout, down to one SHA-256 of all parameters."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    ShardedOptimizer,
    clip_grad_norm,
    finalize_grads,
    full_parameters,
)
from lamina.fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    GPTModel,
    MambaConfig,
    MoEConfig,
    RecomputePolicy,
    TransformerConfig,
    apply_recompute,
    pipeline,
)
from lamina.models.attention import GatedAttention, LatentAttention, RopeScaling, cut_sequence
from lamina.models.bisection.pieces import Share, parameter_piece
from lamina.models.mamba import Mamba2

ROWS, LENGTH, VOCABULARY = 8, 64, 48
SHAPE = TransformerConfig(
    vocab_size=VOCABULARY - 5,
    vocab_multiple=16,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    ffn_size=48,
    max_sequence_length=LENGTH,
    init_std=0.2,
    invariant=True,
)
MAMBA = MambaConfig(head_dim=8, state_size=8, groups=4, chunk_size=32)
MODELS = {
    "grouped": replace(SHAPE, num_heads=8, num_kv_heads=4, qk_norm=True),
    "gpt2": replace(
        SHAPE, positions="learned", norm="layernorm", activation="gelu", attention_bias=True,
        mlp_bias=True,
    ),
    "whole": replace(
        SHAPE, qk_norm="whole", norm="rmsnorm_zero", post_norm=True, sliding_window=20,
        num_heads=8, num_kv_heads=4, activation="geglu_tanh",
    ),
    "gated": replace(
        SHAPE, num_heads=8, num_kv_heads=4, attention=GatedAttention(), embedding_norm=True,
        qk_norm="after_rope",
    ),
    "growing queries": replace(
        SHAPE,
        rope_scaling=RopeScaling(kind="yarn", factor=2.0, original_length=16, query_beta=0.5),
    ),
    "latent": replace(
        SHAPE,
        mla=LatentAttention(
            kv_lora_rank=16, q_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
        ),
    ),
}  # fmt: skip


LOSSES = MoEConfig(num_experts=8, top_k=2, ffn_size=16, sequence_loss=0.1, bias_rate=0.01)
KINDS = {
    "experts": replace(SHAPE, moe=LOSSES),
    "sigmoid experts": replace(
        SHAPE,
        moe=replace(
            LOSSES,
            scores="sigmoid",
            num_groups=4,
            groups_kept=2,
            shared_ffn_size=16,
            z_loss=0.01,
            global_loss=0.1,
            global_loads="last_step",
        ),
    ),
    "mamba": replace(SHAPE, layer_pattern="MM", mamba=MAMBA),
    "mamba blocks": replace(SHAPE, attention=Mamba2(), mamba=MAMBA),
    "hybrid": replace(SHAPE, layer_pattern="M*-E", num_layers=4, mamba=MAMBA, moe=LOSSES),
}
"""Experts are on axes of their own; Mamba does not know cp."""
RANDOM = {
    "dropout": replace(SHAPE, dropout=0.2, embedding_dropout=0.1),
    "attention dropout": replace(SHAPE, num_heads=8, num_kv_heads=4, attention_dropout=0.2),
    "noisy experts": replace(
        SHAPE, moe=replace(LOSSES, jitter=0.1, capacity_factor=0.75), dropout=0.1
    ),
}
"""What draws random numbers; and experts with a capacity."""


@dataclass(frozen=True)
class Layout:
    """How ranks share a step: 8 sequences of 64 tokens, whatever the layout."""

    dp: int = 1
    replicate: int = 1
    tp: int = 1
    sp: bool = False
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    way: str = "ring"
    pp: int = 1
    schedule: str = "1f1b"
    strategy: int = 3
    ddp: bool = False
    microbatches: int = 1
    chunk: int | None = None
    recompute: str = ""

    @property
    def ranks(self) -> int:
        """The world that it needs."""
        return self.dp * self.replicate * self.tp * self.cp * self.pp

    def __str__(self) -> str:
        """The fields that are not the default."""
        said = {k: v for k, v in vars(self).items() if v != getattr(Layout, k)}
        return ",".join(k if v is True else f"{k}{v}" for k, v in said.items()) or "alone"


LAYOUTS = (
    *(Layout(microbatches=count) for count in (2, 8)),
    Layout(strategy=1), Layout(recompute="full"), Layout(chunk=70), Layout(ddp=True, strategy=0),
    # 2 ranks
    *(Layout(dp=2, strategy=strategy) for strategy in (0, 1, 2, 3)),
    Layout(replicate=2, strategy=0), Layout(dp=2, strategy=1, microbatches=2),
    Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=2, microbatches=4),
    *(Layout(cp=2, way=way) for way in ("ring", "all_gather", "ulysses")),
    Layout(pp=2, microbatches=2), Layout(pp=2, schedule="gpipe", microbatches=4),
    Layout(dp=2, ddp=True, strategy=1), Layout(tp=2, ddp=True, strategy=1),
    # 4 ranks
    Layout(dp=4), Layout(dp=4, strategy=1), Layout(dp=4, strategy=2, microbatches=2),
    Layout(dp=2, replicate=2), Layout(dp=2, replicate=2, strategy=0, microbatches=2),
    Layout(tp=4), Layout(tp=4, sp=True), Layout(tp=2, sp=True, dp=2),
    Layout(tp=2, dp=2, strategy=1, microbatches=2), Layout(tp=2, dp=2, ddp=True, strategy=1),
    Layout(cp=4), Layout(cp=2, dp=2), Layout(cp=2, dp=2, way="ulysses", microbatches=2),
    Layout(tp=2, cp=2), Layout(tp=2, sp=True, cp=2), Layout(tp=2, sp=True, cp=2, way="ulysses"),
    Layout(tp=2, sp=True, pp=2, microbatches=2), Layout(cp=2, pp=2, microbatches=2),
    Layout(dp=2, pp=2, microbatches=2), Layout(dp=2, pp=2, strategy=0, microbatches=4),
    # 8 ranks
    Layout(dp=8), Layout(tp=2, sp=True, cp=2, dp=2), Layout(dp=2, replicate=2, tp=2),
    Layout(tp=2, sp=True, pp=2, dp=2, microbatches=2),
    Layout(tp=2, sp=True, cp=2, pp=2, microbatches=2),
    Layout(cp=4, dp=2), Layout(tp=4, sp=True, dp=2),
    Layout(dp=4, replicate=2, strategy=1), Layout(tp=2, dp=4), Layout(dp=4, pp=2, microbatches=2),
    Layout(tp=4, pp=2, microbatches=4), Layout(tp=2, sp=True, replicate=4, strategy=0),
)  # fmt: skip


WITHOUT_CP = (
    Layout(tp=2, sp=True, microbatches=4), Layout(tp=2, sp=True, strategy=1),
    Layout(dp=2, strategy=2, microbatches=4),
    # 4 ranks
    Layout(dp=2, pp=2, schedule="gpipe", microbatches=2),
    Layout(tp=2, sp=True, replicate=2, strategy=0),
    Layout(tp=2, sp=True, dp=2, strategy=2, microbatches=2), Layout(dp=2, replicate=2, strategy=1),
    # 8 ranks
    Layout(dp=8, strategy=2), Layout(tp=2, sp=True, dp=4, strategy=1),
    Layout(tp=2, sp=True, replicate=2, pp=2, strategy=0, microbatches=2),
)  # fmt: skip
"""In place of those with cp, which Mamba does not know."""


EXPERT_LAYOUTS = (
    *(each for each in LAYOUTS if each.tp == 1 or each.sp),
    Layout(dp=2, ep=2, strategy=1, microbatches=2),
    Layout(dp=2, expert_tp=2), Layout(tp=2, expert_tp=2), Layout(tp=2, sp=True, ep=2),
    Layout(dp=4, ep=2, expert_tp=2),
    Layout(dp=2, replicate=2, ep=2), Layout(tp=2, sp=True, dp=2, ep=4),
    Layout(tp=2, sp=True, cp=2, ep=2), Layout(dp=2, pp=2, ep=2, microbatches=2),
    Layout(tp=2, sp=True, pp=2, dp=2, ep=4, microbatches=2),
)  # fmt: skip


def layouts_of(model: str) -> tuple[Layout, ...]:
    """The layouts that a model knows."""
    config = {**MODELS, **KINDS, **RANDOM}[model]
    chosen = EXPERT_LAYOUTS if config.moe else LAYOUTS
    if config.mamba is None:
        return chosen
    return tuple(each for each in (*chosen, *WITHOUT_CP) if each.cp == 1)


def by_ranks(model: str, dtype: torch.dtype) -> dict[int, list[Layout]]:
    """The layouts of a model by their number of ranks.

    A model in bf16 under DDP starts from rounded weights: another model.
    """
    layouts: dict[int, list[Layout]] = {}
    for layout in layouts_of(model):
        if not (layout.ddp and dtype is torch.bfloat16):
            layouts.setdefault(layout.ranks, []).append(layout)
    return layouts


def hashes_of(model: str, layouts: list[Layout], dtype: torch.dtype, steps: int) -> list[str]:
    """The hash of each layout, all of them on one process group."""
    return [sha256(train(model, layout, dtype, steps)) for layout in layouts]


def hashes_alone(cases: list[tuple[str, torch.dtype]], steps: int) -> list[str]:
    """The hashes of one rank with one microbatch, of models and dtypes."""
    return [sha256(train(model, Layout(), dtype, steps)) for model, dtype in cases]


def batch(step: int, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch; its sequences count different numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, SHAPE.vocab_size, (rows, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    for row in range(rows):
        labels[row, : (3 * row + step) % LENGTH] = -100
    return text[:, :-1], labels


class Run:
    """A model under one layout."""

    def __init__(
        self,
        model: str,
        layout: Layout,
        dtype: torch.dtype,
        device: str = "cpu",
        rows: int = ROWS,
    ) -> None:
        self.layout, self.device, self.rows = layout, device, rows
        sizes = {"dp_shard": layout.dp, "dp_replicate": layout.replicate}
        sizes |= {name: getattr(layout, name) for name in ("tp", "cp", "pp", "ep", "expert_tp")}
        self.mesh = ParallelLayout(**sizes).build(device)
        config = replace(
            {**MODELS, **KINDS, **RANDOM}[model], sequence_parallel=layout.sp,
            context_parallel=layout.way, loss_chunk=layout.chunk,
        )  # fmt: skip
        self.config = config
        gpt = GPTModel(config, self.mesh, seed=1).to(device)
        self.roles = {name: role_of(p) for name, p in gpt.named_parameters()}
        if layout.recompute:
            apply_recompute(gpt, RecomputePolicy(kind=layout.recompute))
        self.runner: Any = None
        if layout.pp > 1:
            self.runner = pipeline(
                gpt, self.mesh, layout.schedule, layout.microbatches,
                wrap=lambda stage: self.wrapped(stage, dtype),
            )  # fmt: skip
            self.stages = list(self.runner.stages)
        else:
            self.stages = [self.wrapped(gpt, dtype)]
        self.optimizers = [self.optimizer(stage) for stage in self.stages]

    def wrapped(self, stage: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
        layout = self.layout
        if layout.ddp:
            config = DistributedDataParallelConfig(
                invariant=True, calculate_per_token_loss=True, grad_reduce_in_fp32=True,
                use_distributed_optimizer=layout.strategy > 0,
            )  # fmt: skip
            return DistributedDataParallel(stage.to(dtype), config, self.mesh)
        policy = MixedPrecisionPolicy(param_dtype=dtype, grad_comm_dtype=torch.float32)
        return fully_shard(
            stage, device_mesh=self.mesh, zero_dp_strategy=layout.strategy, invariant=True,
            calculate_per_token_loss=True, mixed_precision_policy=policy,
        )  # fmt: skip

    def optimizer(self, stage: torch.nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(stage.parameters(), 1e-2, weight_decay=0.1)
        if self.layout.ddp:
            return ShardedOptimizer(made, stage, self.mesh)
        return fully_shard_optimizer(made, stage)

    def step(self, number: int) -> None:
        """Forwards and backwards of a batch, clipping, and the optimizer's step."""
        mesh, microbatches = self.mesh, self.layout.microbatches
        dp = mesh.axis("dp")
        # Forward m of rank d has piece m * dp + d of the batch.
        tokens, labels = (
            torch.unflatten(x.to(self.device), 0, (microbatches, dp.size, -1))[:, dp.rank]
            for x in batch(number, self.rows)
        )
        if self.runner is not None:
            self.runner.step(tokens.flatten(0, 1), labels.flatten(0, 1))
        else:
            (model,) = self.stages
            for index in range(microbatches):
                if index + 1 < microbatches:
                    with model.no_sync():
                        model(tokens[index], labels[index], reduction="sum").backward()
                else:
                    model(tokens[index], labels[index], reduction="sum").backward()
            axis = mesh.axis("cp") if self.layout.cp > 1 else None
            counted = cut_sequence(labels.flatten(0, 1), axis) != -100
            finalize_grads(model, mesh, num_tokens=counted.sum())
        clip_grad_norm(self.stages, 0.1, mesh)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters, whole, on every rank."""
        own = {name: p for stage in self.stages for name, p in full_parameters(stage).items()}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, (Share.of(self.mesh, self.rows, LENGTH, 1), own))
        with torch.device("meta"):
            sizes = {name: p.shape for name, p in GPTModel(self.config).named_parameters()}
        whole = {}
        for share, named in everywhere:
            for name, value in named.items():
                index = parameter_piece(value.shape, sizes[name], self.roles[name], share)
                flat = whole.setdefault(name, torch.full(sizes[name], torch.nan)).view(-1)
                flat[index.flatten()] = value.cpu().flatten()
        return whole


def sha256(parameters: dict[str, torch.Tensor]) -> str:
    """One hash of names and bits."""
    digest = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(
    model: str,
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    device: str = "cpu",
    rows: int = ROWS,
) -> dict[str, torch.Tensor]:
    """Parameters after some steps on `rows` sequences, whole, on every rank."""
    run = Run(model, layout, dtype, device, rows)
    for number in range(steps):
        run.step(number)
    return run.parameters()
