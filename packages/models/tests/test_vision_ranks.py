"""Vision-language models over ranks, and what frozen parts cost there."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
import torch

from lamina.collectives import Ledger
from lamina.collectives.engine import kept_bytes
from lamina.ddp import finalize_grads, full_parameters, memory_plan
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    MoEConfig,
    TopKRouter,
    TransformerBlock,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
    generate,
)
from lamina.models.engine import cut_weight
from lamina_testing import device_type, live_bytes

VISION = VisionConfig(hidden_size=16, num_layers=2, num_heads=2, patch_size=4, max_grid=8)
LANGUAGE = TransformerConfig(
    vocab_size=20, hidden_size=16, num_layers=2, num_heads=2, ffn_size=32, max_sequence_length=32
)
IMAGE = 19
SIZES = [[(8, 8), (4, 4)], [(4, 8)], [], [(8, 8)]]


def sample(row, step):
    """Sixteen tokens, their images of several sizes (in one row none), and labels."""
    generator = torch.Generator().manual_seed(100 * step + row)
    tokens = torch.randint(0, 19, (16,), generator=generator)
    start, images = 1, []
    for height, width in SIZES[row]:
        count = height * width // 16
        tokens[start : start + count] = IMAGE
        images.append(torch.rand(3, height, width, generator=generator, dtype=torch.float64))
        start += count + 1
    return tokens, images, tokens.roll(-1).masked_fill(tokens.roll(-1) == IMAGE, -100)


def batch(step, rows):
    samples = [sample(row, step) for row in rows]
    return {
        "tokens": torch.stack([tokens for tokens, _, _ in samples]),
        "images": [image for _, images, _ in samples for image in images],
        "labels": torch.stack([labels for _, _, labels in samples]),
    }


def build(frozen=(), mesh=None, language=LANGUAGE):
    model = VisionLanguageModel(VISION, language, mesh, image_token=IMAGE, seed=1).double()
    return model.freeze(*frozen)


def trainable(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def shard(model, strategy, mesh, optimizer=torch.optim.AdamW):
    return fully_shard(
        model,
        optimizer(trainable(model), 3e-3),
        device_mesh=mesh,
        zero_dp_strategy=strategy,
        fsdp_unit_modules=[TransformerBlock],
        calculate_per_token_loss=True,
    )


def train(whole, model, optimizer, mesh):
    """By the sum over tokens: the ranks' rows differ in images (once none) and in labels."""
    plain = torch.optim.AdamW(trainable(whole), 3e-3)
    for step in range(3):
        everything = batch(step, range(4))
        # The second half's first row has no images; in the last step nor has its second.
        rows = [[0, 3], [1, 2]] if step < 2 else [[0, 1, 3], [2]]
        mine = batch(step, rows[mesh.axis("dp").rank])
        count = (everything["labels"] != -100).sum()
        (whole(**everything, reduction="sum") / count).backward()
        model(**mine, reduction="sum").backward()
        finalize_grads(model, mesh, num_tokens=(mine["labels"] != -100).sum())
        for module in whole.modules():
            if isinstance(module, TopKRouter):
                module.finalize_step(None)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()


def check(model, whole, roles=None, mesh=None):
    found = full_parameters(model)
    for name, expected in whole.named_parameters():
        role = None if roles is None else roles[name]
        if role is not None and role.expert:
            expected = expected.chunk(mesh.axis("ep").size)[mesh.axis("ep").rank]
        elif role is not None and role.tp_shard_dim is not None:
            axis = mesh.axis("tp")
            expected = cut_weight(expected, role.tp_shard_dim, axis.rank, axis.size, role.tp_blocks)
        torch.testing.assert_close(
            found[name], expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [(), ("vision",), ("language",)], ids=str)
@pytest.mark.parametrize("strategy", [0, 2, 3])
def test_training_equals_one_process_with_parts_frozen(strategy, frozen):
    mesh = ParallelLayout().build(device_type())
    whole = build(frozen)
    model, optimizer = shard(build(frozen), strategy, mesh)
    train(whole, model, optimizer, mesh)
    check(model, whole)


@pytest.mark.ranks(4)
def test_a_frozen_encoder_cut_over_tp_and_in_pieces_trains_like_one_process():
    mesh = ParallelLayout(dp_shard=2, tp=2).build(device_type())
    language = replace(LANGUAGE, vocab_multiple=4, sequence_parallel=True)
    whole, model = (build(("vision",), where, language) for where in (None, mesh))
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    model, optimizer = shard(model, 3, mesh)
    train(whole, model, optimizer, mesh)
    check(model, whole, roles, mesh)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("strategy", "frozen"), [(0, ()), (3, ("language",))], ids=str)
def test_a_decoder_with_experts_over_ranks_trains_like_one_process(strategy, frozen):
    """Its routers' biases move like one process's, and if it is frozen not at all."""
    mesh = ParallelLayout(ep=2).build(device_type())
    moe = MoEConfig(num_experts=4, top_k=2, ffn_size=8, bias_rate=0.05)
    language = replace(LANGUAGE, moe=moe, init_std=0.3)
    whole, model = (build(frozen, where, language) for where in (None, mesh))
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    model, optimizer = shard(model, strategy, mesh)
    train(whole, model, optimizer, mesh)
    check(model, whole, roles, mesh)
    for name, expected in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), expected)
        assert bool(expected.any()) is not bool(frozen)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("axes", "change"),
    [
        ({"tp": 2}, {}),
        ({"tp": 2}, {"sequence_parallel": True}),
        ({"cp": 2}, {}),
        ({"tp": 2}, {"positions": "learned"}),
    ],
    ids=["tp", "tp and its tokens", "cp", "learned positions"],
)
def test_images_reach_text_that_is_cut_over_ranks(axes, change):
    train_beside_one_process(axes, change)


@pytest.mark.ranks(4)
def test_images_and_positions_are_cut_over_tp_and_not_over_another_axis_of_its_size():
    change = {"sequence_parallel": True, "positions": "learned"}
    train_beside_one_process({"dp_shard": 2, "tp": 2}, change)


def train_beside_one_process(axes, change):
    """Train on the same batch on all ranks, three steps, and compare the weights."""
    mesh = ParallelLayout(**axes).build(device_type())
    language = replace(LANGUAGE, vocab_multiple=4, **change)
    whole, model = build(language=language), build(mesh=mesh, language=language)
    roles = {name: role_of(parameter) for name, parameter in model.named_parameters()}
    plain = torch.optim.AdamW(whole.parameters(), 3e-3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    model, optimizer = fully_shard(model, optimizer, device_mesh=mesh, zero_dp_strategy=0)
    for step in range(3):
        data = batch(step, range(4))
        whole(**data).backward()
        model(**data).backward()
        finalize_grads(model, mesh)
        for each in (plain, optimizer):
            each.step()
            each.zero_grad()
    check(model, whole, roles, mesh)


@pytest.mark.ranks(2)
def test_generation_appends_no_image_tokens(ranks):
    mesh = ParallelLayout(cp=2).build(device_type())
    prompt = torch.tensor([[5, 0, 0, 6, 7]])
    inputs = {"images": [torch.rand(3, 4, 8, generator=torch.Generator().manual_seed(0))]}
    found = []
    for where in (None, mesh):
        model = VisionLanguageModel(VISION, LANGUAGE, where, image_token=0, seed=1)
        found.append(generate(model, prompt, 1, temperature=0.0, inputs=inputs))
    assert torch.equal(*found)


@pytest.mark.matrix(strength=1)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("part", ["vision", "language"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_a_frozen_part_has_no_gradient_memory_and_sends_nothing_but_gathers(strategy, part, ranks):
    mesh = ParallelLayout().build(device_type())
    data = batch(0, [2 * ranks.rank, 2 * ranks.rank + 1])
    # SGD has no state: what is live between steps is weights and gradients.
    model, optimizer = shard(build((part,)), strategy, mesh, torch.optim.SGD)
    for _ in range(2):
        with Ledger() as ledger:
            model(**data, reduction="sum").backward()
            optimizer.step()
            optimizer.zero_grad()
    sizes = {True: 0, False: 0}
    for group in model.parameter_groups():
        frozen = {spec.name.startswith(part) for spec in group.layout.specs}
        assert len(frozen) == 1, "frozen and trained parameters share a buffer"
        sizes[frozen.pop()] += group.layout.size * 8
    assert sizes[True] >= 8 * sum(p.numel() for p in build().get_submodule(part).parameters())

    assert memory_plan(model).main_grads == sizes[False] // (1 if strategy == 0 else 2)
    reduced = sum(ledger.bytes(op=op) for op in ("reduce_scatter_fp32", "all_reduce_fp32"))
    assert reduced == sizes[False] // 2 * (2 if strategy == 0 else 1)
    # Weights that no step changed need no gather either, unless they are at rest in pieces: then
    # once in forward, and in backward where gradients pass through them to the part before.
    passes = {"vision": 1, "language": 2}[part] if strategy == 3 else 0
    trained = {0: 0, 1: 1, 2: 1, 3: 2}[strategy]
    gathered = ledger.bytes(op="all_gather_into")
    assert gathered <= (trained * sizes[False] + passes * sizes[True]) // 2 + 256


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategy", [0, 3])
def test_bytes_at_rest_are_the_plans_with_a_part_frozen(strategy, ranks):
    """Counted from outside, after a step has allocated what it needs."""
    mesh = ParallelLayout().build(device_type())
    data = batch(0, [0, 1])
    gc.collect()
    before = live_bytes()
    model, optimizer = shard(build(("vision",)), strategy, mesh, torch.optim.SGD)
    for _ in range(2):
        model(**data, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    plan, held = memory_plan(model), live_bytes() - before
    assert held <= plan.resident + kept_bytes() + 4096, str(plan)
