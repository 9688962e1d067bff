"""Law 1 on meshes: steps on any mesh equal one process on the whole batch.

`--full` runs every case, four steps each; without it a pairwise cover runs, two steps each.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lamina.ddp import clip_grad_norm, finalize_grads, full_parameters
from lamina.fsdp import fully_shard, fully_shard_optimizer
from lamina.mesh import ParallelLayout, role_of
from lamina.models import GPTModel, TransformerConfig, pipeline
from lamina.models.attention import cut_sequence
from lamina.models.engine import cut_weight
from lamina_testing import device_type

ROWS, LENGTH, VOCABULARY = 16, 8, 40
CONFIG = TransformerConfig(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_layers=3,
    num_heads=4,
    ffn_size=24,
    max_sequence_length=LENGTH,
    init_std=0.2,
    qk_norm=True,
)
TP = {"": {}, "tp2": {"tp": 2}, "tp2+sp": {"tp": 2}}
CP = ("", "ring", "all_gather", "ulysses")
PP = ("", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble")
DP = {"": {}, "shard2": {"dp_shard": 2}, "replicate2 x shard2": {"dp_replicate": 2, "dp_shard": 2}}


def world_of(tp, cp, pp, dp):
    return (
        (2 if tp else 1)
        * (2 if cp else 1)
        * (2 if pp else 1)
        * (4 if "x" in dp else 2 if dp else 1)
    )


def exists(tp, cp, pp, dp, ranks):
    """The meshes of the issue: each kind alone, and the combinations that it names."""
    kinds = tuple(bool(kind) for kind in (tp, cp, pp, dp))
    named = {
        (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (1, 0, 0, 1), (0, 0, 0, 1),
        (1, 0, 1, 0), (1, 0, 1, 1), (1, 1, 0, 0), (1, 1, 0, 1),
    }  # fmt: skip
    replicas = "x" in dp
    return (
        kinds in named
        and (ranks < 8 or (cp in ("", "ring") and pp != "interleaved_1f1b"))
        and (kinds != (0, 0, 0, 1) or replicas)  # dp_shard 2 alone is packages/fsdp's
        and (not replicas or kinds == (0, 0, 0, 1))
        and ranks == world_of(tp, cp, pp, dp)
    )


def batch(step):
    """The whole batch; its sequences count different numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    text = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
    labels = text[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : (3 * row + step) % LENGTH] = -100
    return text[:, :-1], labels


def optimizer_of(precision, parameters):
    if precision == "fp64":
        return torch.optim.AdamW(parameters, 1e-3)
    return torch.optim.SGD(parameters, 0.02, momentum=0.9)


class OneProcess:
    """The oracle: no mesh, no wrapper."""

    def __init__(self, config, precision, shares):
        self.model = GPTModel(config, seed=1).to(dtype_of(precision))
        self.optimizer = optimizer_of(precision, self.model.parameters())
        self.shares = shares

    def step(self, tokens, labels):
        """The mean over all labels, or with `shares` the mean of the means of as many parts."""
        parts = zip(tokens.chunk(self.shares), labels.chunk(self.shares), strict=True)
        loss = sum(self.model(*part) / self.shares for part in parts)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), float("inf"))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def dtype_of(precision):
    return torch.float64 if precision == "fp64" else torch.float32


class OnMesh:
    """The same model over a mesh, under `fully_shard`."""

    def __init__(self, config, precision, mesh, schedule, strategy, per_token):
        self.mesh, self.per_token = mesh, per_token
        model = GPTModel(config, mesh, seed=1).to(dtype_of(precision))
        self.roles = {name: role_of(p) for name, p in model.named_parameters()}
        settings = {
            "device_mesh": mesh,
            "zero_dp_strategy": strategy,
            "calculate_per_token_loss": per_token,
        }
        self.runner = None
        if schedule:
            self.runner = pipeline(
                model, mesh, schedule, 4, wrap=lambda stage: fully_shard(stage, **settings)
            )
            self.stages = list(self.runner.stages)
        else:
            self.stages = [fully_shard(model, **settings)]
        self.optimizers = [
            fully_shard_optimizer(optimizer_of(precision, stage.parameters()), stage)
            for stage in self.stages
        ]

    def step(self, tokens, labels):
        dp = self.mesh.axis("dp")
        mine = tokens.chunk(dp.size)[dp.rank], labels.chunk(dp.size)[dp.rank]
        if self.runner is not None:
            self.runner.step(*mine)
        else:
            (model,) = self.stages
            model(*mine, reduction="sum" if self.per_token else "mean").backward()
            cut = cut_sequence(mine[1], self.mesh.axis("cp") if self.mesh.layout.cp > 1 else None)
            count = (cut != -100).sum() if self.per_token else None
            finalize_grads(model, self.mesh, num_tokens=count)
        norm = clip_grad_norm(self.stages, float("inf"), self.mesh)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return norm

    def parameters(self):
        return {name: p for stage in self.stages for name, p in full_parameters(stage).items()}


@pytest.mark.matrix(where=exists, few=12)
@pytest.mark.ranks(2, 4, 8, timeout=180)
@pytest.mark.parametrize("tp", list(TP))
@pytest.mark.parametrize("cp", CP)
@pytest.mark.parametrize("pp", PP)
@pytest.mark.parametrize("dp", list(DP))
@pytest.mark.parametrize("strategy", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_every_mesh_equals_one_process(tp, cp, pp, dp, strategy, tied, precision, ranks, steps):
    layout = ParallelLayout(
        **TP[tp], **({"cp": 2} if cp else {}), **({"pp": 2} if pp else {}), **DP[dp]
    )
    mesh = layout.build(device_type())
    per_token = tied
    config = replace(
        CONFIG,
        tie_embeddings=tied,
        sequence_parallel=tp == "tp2+sp",
        context_parallel=cp or "ring",
    )
    whole = OneProcess(config, precision, 1 if per_token else mesh.axis("dp").size)
    model = OnMesh(config, precision, mesh, pp, strategy, per_token)
    for step in range(steps):
        wanted, found = whole.step(*batch(step)), model.step(*batch(step))
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=0)
    found = model.parameters()
    assert_equal(found, dict(whole.model.named_parameters()), model.roles, mesh, precision)
    assert_copies_identical(found, model.roles, mesh)


def assert_equal(found, wanted, roles, mesh, precision):
    tp = mesh.axis("tp")
    tolerance = 1e-9 if precision == "fp64" else 2e-5
    everywhere = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, set(found))
    assert set().union(*everywhere) == set(wanted), "a parameter is on no rank"
    for name, value in found.items():
        expected, role = wanted[name].detach(), roles[name]
        if role.tp_shard_dim is not None and tp.size > 1:
            expected = cut_weight(expected, role.tp_shard_dim, tp.rank, tp.size, role.tp_blocks)
        torch.testing.assert_close(
            value, expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_copies_identical(found, roles, mesh):
    """Every rank that holds a parameter (or the same piece of it) holds the same bits."""
    place = mesh.coordinate["tp"]
    mine = {
        (name, place if roles[name].tp_shard_dim is not None else None): hashlib.sha256(
            value.cpu().contiguous().numpy().tobytes()
        ).hexdigest()
        for name, value in found.items()
    }
    everywhere = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    for held in everywhere:
        for piece, digest in held.items():
            assert mine.get(piece, digest) == digest, f"{piece} differs between ranks"
