"""Auxiliary losses where microbatches and ranks have unequal numbers of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import finalize_grads, full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, MoEConfig, TransformerConfig, pipeline
from lamina_testing import device_type

from . import moe_oracle

MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8)
CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, init_std=0.3, moe=MOE
)
LOSSES = {"switch_loss": 0.1, "sequence_loss": 0.2, "global_loss": 0.1, "z_loss": 0.02}


class Whole:
    """The model in one process, its experts one by one; gradients of several forwards."""

    def __init__(self, config):
        self.model = GPTModel(config, seed=1).double()
        self.layers = []
        for block in self.model.blocks:
            block.mlp = moe_oracle.LoopMoE(moe_oracle.weights_of(block.mlp), config.moe)
            self.layers.append(block.mlp)

    def backward(self, parts, padding, weights):
        """Sequences of several ranks at once, whose means have these weights."""
        tokens, labels = (torch.cat(each) for each in zip(*parts, strict=True))
        ends = torch.tensor([part[0].numel() for part in parts]).cumsum(0).tolist()
        sets = [list(range(end - p[0].numel(), end)) for end, p in zip(ends, parts, strict=True)]
        for layer in self.layers:
            layer.sets, layer.padding = sets, padding.flatten()
        logits = self.model(tokens).flatten(0, 1)
        for i, (held, weight) in enumerate(zip(sets, weights, strict=True)):
            wanted = labels.flatten()[held]
            loss = torch.nn.functional.cross_entropy(logits[held], wanted)
            loss = loss + sum(sum(layer.parts[i].values()) for layer in self.layers)
            (weight * loss).backward(retain_graph=True)

    def compare(self, gradients, rank=0, ranks=1):
        wholes = dict(self.model.named_parameters())
        for name, found in gradients.items():
            for short, full in moe_oracle.NAMES.items():
                name = name.replace(full, short) if ".mlp." in name else name
            expected = wholes[name].grad
            if found.shape != expected.shape:
                expected = expected.chunk(ranks)[rank]
            torch.testing.assert_close(
                found, expected, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


def counted(labels):
    return int((labels != -100).sum())


@pytest.mark.ranks(2)
def test_auxiliary_losses_of_unequal_microbatches_and_ranks_equal_one_process(ranks):
    config = replace(CONFIG, moe=replace(MOE, **LOSSES))
    check_pipeline(config)
    check_ranks(config, ranks.rank)


def check_pipeline(config):
    """Microbatches of 3 and 2 sequences weigh as many labels as they have."""
    mesh = ParallelLayout(pp=2).build(device_type())
    tokens, labels = moe_oracle.text(5)
    padding = torch.arange(8) >= torch.tensor([[8], [5], [7], [8], [3]])
    whole = Whole(config)
    for piece in (slice(0, 3), slice(3, 5)):
        share = counted(labels[piece]) / counted(labels)
        whole.backward([(tokens[piece], labels[piece])], padding[piece], [share])
    for wrap in (None, lambda stage: fully_shard(
        stage, device_mesh=mesh, calculate_per_token_loss=True
    )):  # fmt: skip
        model = GPTModel(config, mesh, seed=1).double()
        runner = pipeline(model, mesh, "1f1b", num_microbatches=2, wrap=wrap)
        runner.step(tokens, labels, padding_mask=padding)
        bare = {name: p.grad for name, p in runner.named_parameters()}
        whole.compare(bare if wrap is None else full_gradients(runner))


def check_ranks(config, rank):
    """Sequences of each rank in each of two microbatches: means weigh the same, tokens do."""
    mesh = ParallelLayout(ep=2).build(device_type())
    parts = [
        [moe_oracle.text(3, 1), moe_oracle.text(1, 2)],
        [moe_oracle.text(1, 3), moe_oracle.text(2, 4)],
    ]
    labels = sum(counted(part[1]) for both in parts for part in both)
    for per_token in (False, True):
        whole = Whole(config)
        model = fully_shard(
            GPTModel(config, mesh, seed=1).double(),
            device_mesh=mesh,
            calculate_per_token_loss=per_token,
        )
        for both in parts:
            padding = torch.zeros(sum(part[0].numel() for part in both), dtype=torch.bool)
            weights = [counted(part[1]) / labels if per_token else 0.25 for part in both]
            whole.backward(both, padding, weights)
            if per_token:
                model(*both[rank], reduction="sum").backward()
            else:
                (model(*both[rank]) / 2).backward()
        own = sum(counted(both[rank][1]) for both in parts)
        finalize_grads(model, mesh, num_tokens=own if per_token else None)
        whole.compare(full_gradients(model), rank, 2)
