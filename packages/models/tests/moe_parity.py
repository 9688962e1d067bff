"""A model with experts over ranks beside one process that holds all of them, step by step."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from lamina.ddp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Muon,
    ShardedOptimizer,
    clip_grad_norm,
    finalize_grads,
    full_parameters,
)
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    GPTModel,
    MoEConfig,
    MoELayer,
    TopKRouter,
    TransformerConfig,
    apply_recompute,
    pipeline,
    routing_statistics,
)
from lamina.models.engine import cut_weight
from lamina_testing import device_type
from lamina_testing.oracles import PlainMuon

from . import moe_oracle

BATCH, LENGTH = 4, 8
MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8)
CONFIG = TransformerConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=2,
    num_heads=2,
    ffn_size=24,
    max_sequence_length=32,
    init_std=0.3,
    moe=MOE,
)


@dataclass
class Case:
    """A layout, what the experts are, and how the model is wrapped."""

    axes: dict[str, int]
    moe: dict[str, Any] = field(default_factory=dict)
    strategy: int | str = 3
    outer: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    per_token: bool = False
    recompute: str = "none"
    fp32: bool = False
    max_norm: float | None = None
    muon: bool = False
    """Muon for all matrices, beside AdamW, in place of AdamW."""
    crowded: int | None = None
    """The expert that every token goes to first, by a bias that nothing moves."""
    padding: bool = False
    """The sequences end in padding, each in another number of tokens."""


def batch(step, microbatch):
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    tokens = torch.randint(0, 32, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def padding_of(step, microbatch):
    real = torch.tensor([LENGTH, 3, LENGTH - 1, 5]).roll(step + microbatch)
    return torch.arange(LENGTH) >= real[:, None]


class Oracle:
    """One process, the whole batch, experts one by one."""

    def __init__(self, case, config, layout):
        plain = replace(config, sequence_parallel=False)
        self.case = case
        self.model = GPTModel(plain, seed=1).to(torch.float32 if case.fp32 else torch.float64)
        senders = moe_oracle.tokens_of_ranks(layout, BATCH, LENGTH, config.sequence_parallel)
        sets: dict[int, list[int]] = {}
        for (dp, _, tp), tokens in senders.items():
            if tp == 0 or config.sequence_parallel:
                sets.setdefault(dp, []).extend(tokens)
        self.senders = senders
        self.layers = {}
        for index, block in enumerate(self.model.blocks):
            for name, held in block.named_children():
                if not isinstance(held, MoELayer):
                    continue
                layer = moe_oracle.LoopMoE(
                    moe_oracle.weights_of(held), config.moe, config.activation
                )
                layer.senders = [tokens for (_, _, tp), tokens in senders.items()
                                 if tp == 0 or config.sequence_parallel]  # fmt: skip
                layer.sets = list(sets.values())
                crowd(case, layer.bias)
                setattr(block, name, layer)
                self.layers[f"blocks.{index}.{name}"] = layer
        self.optimizer = optimizer_of(case, self.model.parameters())
        if case.muon:
            no_matrices = re.compile(r"norm|embedding|head|bias")
            self.optimizer = PlainMuon(
                self.model, 0.05, 0.01, lambda name: not no_matrices.search(name)
            )
        self.chosen = {}

    def step(self, index):
        self.chosen = {}
        for layer in self.layers.values():
            layer.end_step()
        for microbatch in range(self.case.microbatches):
            tokens, labels = batch(index, microbatch)
            if self.case.padding:
                for layer in self.layers.values():
                    layer.padding = padding_of(index, microbatch).flatten().tolist()
            loss = self.model(tokens, labels) + sum(x.loss for x in self.layers.values())
            (loss / self.case.microbatches).backward()
            for name, layer in self.layers.items():
                self.chosen.setdefault(name, []).append(layer.decided)
        for layer in self.layers.values():
            if layer.moe.bias_rate:
                layer.update_bias()
        self.norm = None
        if self.case.max_norm is not None:
            parameters = self.model.parameters()
            self.norm = torch.nn.utils.clip_grad_norm_(parameters, self.case.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self):
        found = {}
        for name, value in self.model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            name = f"{owner}.{moe_oracle.NAMES[leaf]}" if owner in self.layers else name
            found[name] = value.detach()
        return found


def optimizer_of(case, parameters):
    if case.fp32:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-2)


def crowd(case, bias):
    if case.crowded is not None:
        with torch.no_grad():
            bias[case.crowded] = 100.0


class Run:
    """The same model over this test's ranks."""

    def __init__(self, case, config):
        self.case = case
        self.mesh = ParallelLayout(**case.axes).build(device_type())
        model = GPTModel(config, self.mesh, seed=1)
        model = model.to(torch.float32 if case.fp32 else torch.float64)
        for module in model.modules():
            if isinstance(module, TopKRouter):
                crowd(case, module.expert_bias)
        apply_recompute(model, case.recompute)
        self.roles = {name: role_of(p) for name, p in model.named_parameters()}
        self.chosen: dict[str, list[list[list[int]]]] = {}
        if self.mesh.axis("pp").size > 1:
            self.cut(model)
        else:
            muon = (
                Muon(model, lr=0.05, adamw_lr=0.01, ns_dtype=torch.float64) if case.muon else None
            )
            self.wrap(model, muon or optimizer_of(case, model.parameters()))
        self.routers = {}
        for name, module in self.model.named_modules():
            if isinstance(module, TopKRouter):
                name = name[name.index("blocks.") :].removesuffix(".router")
                self.routers[name] = module
                module.register_forward_hook(self.watch(name))

    def cut(self, model):
        case = self.case
        sharded = isinstance(case.strategy, str)
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = pipeline(
            model,
            self.mesh,
            schedule="1f1b" if case.microbatches > 1 else "gpipe",
            num_microbatches=case.microbatches,
            wrap=lambda stage: (
                DistributedDataParallel(stage, settings, self.mesh)
                if sharded
                else fully_shard(
                    stage,
                    device_mesh=self.mesh,
                    zero_dp_strategy=case.strategy,
                    outer_dp_sharding_strategy=case.outer,
                )
            ),
        )
        self.optimizer = optimizer_of(case, [p for _, p in self.model.named_parameters()])
        if sharded:
            self.optimizer = ShardedOptimizer(self.optimizer, self.model, self.mesh)

    def wrap(self, model, optimizer):
        case = self.case
        if isinstance(case.strategy, str):
            sharded = "sharded" in case.strategy
            settings = DistributedDataParallelConfig(
                use_distributed_optimizer=sharded, calculate_per_token_loss=case.per_token
            )
            self.model = DistributedDataParallel(model, settings, self.mesh)
            self.optimizer = optimizer
            if sharded:
                self.optimizer = ShardedOptimizer(optimizer, self.model, self.mesh)
        else:
            self.model, self.optimizer = fully_shard(
                model,
                optimizer,
                device_mesh=self.mesh,
                zero_dp_strategy=case.strategy,
                outer_dp_sharding_strategy=case.outer,
                calculate_per_token_loss=case.per_token,
            )

    def watch(self, name):
        def hook(module, inputs, routing):
            if torch._C._current_graph_task_id() == -1:
                self.chosen.setdefault(name, []).append(routing.experts.tolist())

        return hook

    def step(self, index):
        self.chosen, count = {}, self.case.microbatches
        dp = self.mesh.axis("dp")
        whole = [
            (*batch(index, m), *((padding_of(index, m),) if self.case.padding else ()))
            for m in range(count)
        ]
        mine = [[x.chunk(dp.size)[dp.rank] for x in each] for each in whole]
        if self.mesh.axis("pp").size > 1:
            self.model.step(*(torch.cat(each) for each in zip(*mine, strict=True)))
        else:
            self.backwards(mine)
        self.norm = None
        if self.case.max_norm is not None:
            self.norm = clip_grad_norm(self.model, self.case.max_norm, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def backwards(self, microbatches):
        count = len(microbatches)
        for microbatch, given in enumerate(microbatches):
            if microbatch < count - 1:
                with self.model.no_sync():
                    self.backward(*given)
            else:
                self.backward(*given)
        labels_seen = count * given[1].numel() // self.mesh.axis("cp").size
        finalize_grads(
            self.model, self.mesh, num_tokens=labels_seen if self.case.per_token else None
        )

    def backward(self, tokens, labels, padding=None):
        if self.case.per_token:
            self.model(tokens, labels, reduction="sum", padding_mask=padding).backward()
        else:
            (self.model(tokens, labels, padding_mask=padding) / self.case.microbatches).backward()

    def piece(self, name, whole):
        """What this rank holds of a whole parameter."""
        role = self.roles[name]
        if not role.expert:
            axis = self.mesh.axis("tp")
        else:
            ep, axis = self.mesh.axis("ep"), self.mesh.axis("expert_tp")
            held = whole.shape[0] // ep.size
            whole = whole[ep.rank * held : (ep.rank + 1) * held]
        if role.tp_shard_dim is None:
            return whole
        return cut_weight(whole, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)


def check(case, steps):
    fixed = {} if case.crowded is None else {"bias_rate": 0.0}
    config = replace(CONFIG, moe=replace(MOE, **case.moe, **fixed), **case.config)
    run = Run(case, config)
    oracle = Oracle(case, config, run.mesh.layout)
    at = run.mesh.coordinate
    here = oracle.senders[at["dp_replicate"] * run.mesh.axis("dp_shard").size + at["dp_shard"],
                          at["cp"], at["tp"]]  # fmt: skip
    for step in range(steps):
        run.step(step)
        oracle.step(step)
        assert set(run.chosen) == set(run.routers)
        for name, found in run.chosen.items():
            assert found == [[each[t] for t in here] for each in oracle.chosen[name]]
        compare_books(run, oracle, config)
        if case.max_norm is not None:
            torch.testing.assert_close(run.norm, oracle.norm.float(), rtol=1e-6, atol=0)
            assert math.isinf(case.max_norm) or run.norm > case.max_norm, "nothing is clipped"
    parameters = full_parameters(run.model)
    expected = oracle.parameters()
    if run.mesh.axis("pp").size == 1:
        assert set(parameters) == set(expected)
    clips = case.max_norm is not None and math.isfinite(case.max_norm)
    bound = 2e-5 if case.fp32 else 1e-7 if clips else 1e-9  # a norm is rounded to float32
    for name in parameters:
        whole = expected[name]
        torch.testing.assert_close(
            parameters[name], run.piece(name, whole), rtol=bound, atol=bound,
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip


def compare_books(run, oracle, config):
    """Loads, losses, what was dropped, entropies, and biases after a step."""
    statistics = routing_statistics(run.model, run.mesh)
    if run.mesh.axis("pp").size == 1:
        assert set(run.routers) == set(oracle.layers)
    assert run.routers, "no router on this rank"
    for name, router in run.routers.items():
        layer = oracle.layers[name]
        found = next(v for k, v in statistics.items() if k.endswith(f"{name}.router"))
        load = layer.load.double() / layer.load.sum()
        assert found.load == pytest.approx(load.tolist(), abs=1e-12)
        copies = layer.load.sum().item()
        if run.case.crowded is not None:
            assert layer.load[run.case.crowded] * config.moe.top_k == copies
        assert found.dropped == pytest.approx(layer.dropped / copies, abs=1e-12)
        entropy = layer.entropy * config.moe.top_k / copies
        assert found.entropy == pytest.approx(entropy, rel=1e-5 if run.case.fp32 else 1e-9)
        losses = {key: value / run.case.microbatches for key, value in layer.losses.items()}
        assert found.losses == pytest.approx(losses, rel=1e-5 if run.case.fp32 else 1e-9)
        if config.moe.bias_rate:
            assert torch.equal(router.expert_bias, layer.bias)
            assert router.expert_bias.dtype == torch.float32
