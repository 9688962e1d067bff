"""Layers that predict tokens beyond the next one, beside plain PyTorch and over ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    LayerSpec,
    MoEConfig,
    MultiTokenPrediction,
    VisionConfig,
    VisionLanguageModel,
    apply_recompute,
    generate,
    pipeline,
    to_huggingface,
    training_flops_per_token,
)
from lamina_testing import device_type

from .test_mesh_parity import CONFIG, OneProcess, OnMesh, assert_equal, batch

TWO = replace(CONFIG, mtp=MultiTokenPrediction(depth=2, weight=0.7))
EXPERTS = replace(TWO, moe=MoEConfig(num_experts=4, top_k=2, ffn_size=8, first_dense=1))
MESHES = {
    "tp": (TWO, {"tp": 2}),
    "sequence": (replace(TWO, sequence_parallel=True), {"tp": 2}),
    "ring": (TWO, {"cp": 2}),
    "gathered keys": (replace(TWO, context_parallel="all_gather"), {"cp": 2}),
    "shards, tied": (replace(TWO, tie_embeddings=True), {"dp_shard": 2}),
    "learned positions": (replace(TWO, positions="learned"), {"cp": 2}),
    "experts": (EXPERTS, {"dp_shard": 2, "ep": 2}),
}


def plain_loss(model, tokens, labels):
    """The loss of one process by its definition; blocks alone are the model's own."""
    given = {}
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda _, inputs: given.update(of=inputs[1])),
        model.final_norm.register_forward_hook(lambda _, inputs, output: given.update(x=output)),
    ]
    model.eval()
    model(tokens)
    model.train()
    for hook in hooks:
        hook.remove()

    def norm(x, module):
        return F.rms_norm(x, x.shape[-1:], module.weight, model.config.norm_eps)

    def sum_of(x, wanted):
        logits = x @ model.head.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")

    x, (rows, length) = given["x"], tokens.shape
    total, further = sum_of(x, labels), 0.0
    for k, layer in enumerate(model.mtp, start=1):
        later = torch.zeros_like(x)
        wanted = torch.full_like(labels, -100)
        for i in range(length):
            if i + k < length:
                wanted[:, i] = labels[:, i + k]
            ids = tokens[:, i + k] if i + k < length else torch.zeros(rows, dtype=torch.int64)
            later[:, i] = model.embedding.weight[ids]
        joined = torch.cat([norm(later, layer.embedding_norm), norm(x, layer.hidden_norm)], -1)
        x = norm(layer.block(joined @ layer.projection.weight.t(), given["of"]), layer.final_norm)
        further = further + sum_of(x, wanted)
    mtp = model.config.mtp
    return (total + mtp.weight * further / mtp.depth) / (labels != -100).sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_loss_and_gradients_are_those_of_the_definition(recompute):
    model = GPTModel(TWO, seed=1).double()
    apply_recompute(model, recompute)
    loss = model(*batch(0))
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    assert len([name for name in grads if name.startswith("mtp.1.")]) > 5
    model.zero_grad()
    wanted = plain_loss(model, *batch(0))
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_document_is_predicted_as_if_it_were_alone():
    model = GPTModel(TWO, seed=1).double()
    text = batch(0)[0][:2]
    ids = torch.tensor([[0] * 3 + [1] * 5, [4] * 6 + [0] * 2])
    labels = text.roll(-1, 1)
    packed = model(text, labels, document_ids=ids, reduction="sum")
    alone = 0.0
    for row, ends in enumerate(([0, 3, 8], [0, 6, 8])):
        for begin, end in pairwise(ends):
            part = slice(begin, end)
            alone += model(text[row : row + 1, part], labels[row : row + 1, part], reduction="sum")
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)


def test_experts_take_no_token_that_is_not_there():
    model = GPTModel(EXPERTS, seed=1)
    taken = []
    for layer in model.mtp:
        layer.block.mlp.router.register_forward_hook(
            lambda _, inputs, output: taken.append(int((output.experts < 4).sum()))
        )
    tokens, labels = batch(0)
    padding = torch.zeros_like(tokens, dtype=torch.bool)
    padding[0, 4:] = True
    model(tokens, labels, padding_mask=padding)
    real = tokens.numel() - 4
    # The last token of each row has no next one, and the last two have none after that.
    assert taken == [2 * (real - len(tokens)), 2 * (real - 2 * len(tokens))]


def test_evaluation_and_generation_are_those_of_the_model_without_them():
    model, plain = GPTModel(TWO, seed=1).eval(), GPTModel(CONFIG, seed=1).eval()
    tokens, labels = batch(0)
    assert torch.equal(model(tokens, labels), plain(tokens, labels))
    assert torch.equal(model(tokens), plain(tokens))
    prompt = tokens[:, :3]
    texts = [generate(each, prompt, 4, temperature=0.0) for each in (model, plain)]
    assert torch.equal(*texts)


def test_operations_of_the_further_layers_count():
    block = 6 * sum(p.numel() for p in GPTModel(CONFIG).blocks[2].parameters() if p.ndim > 1)
    attention = training_flops_per_token(CONFIG, 8) - training_flops_per_token(
        replace(CONFIG, num_layers=2), 8
    ) - block  # fmt: skip
    added = training_flops_per_token(TWO, 8) - training_flops_per_token(CONFIG, 8)
    assert added == 2 * (block + attention + 6 * (2 * 16 * 16 + 40 * 16))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", list(MESHES))
def test_every_mesh_equals_one_process(name, ranks):
    config, axes = MESHES[name]
    mesh = ParallelLayout(**axes).build(device_type())
    plain = replace(config, sequence_parallel=False)
    whole = OneProcess(plain, "fp64", mesh.axis("dp").size)
    model = OnMesh(config, "fp64", mesh, "", 3, False)
    for step in range(3):
        wanted, found = whole.step(*batch(step)), model.step(*batch(step))
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=0)
    found, expected = model.parameters(), dict(whole.model.named_parameters())
    for key in found if "ep" in axes else ():
        if found[key].shape != expected[key].shape:  # this rank's run of the experts
            expected[key] = expected[key].chunk(2)[ranks.rank]
    assert_equal(found, expected, model.roles, mesh, "fp64")


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="depth is 0: it must be at least 1"):
        MultiTokenPrediction(depth=0)
    with pytest.raises(ValueError, match=r"weight is 0\.0: it must be positive"):
        MultiTokenPrediction(weight=0.0)
    with pytest.raises(ValueError, match=r"invariant=True beside mtp=MultiTokenPrediction"):
        replace(TWO, invariant=True)
    with pytest.raises(ValueError, match="mtp cannot be that of one layer"):
        LayerSpec(mtp=MultiTokenPrediction())
    with pytest.raises(ValueError, match=r"mtp=.* in a model of type qwen3: of the types"):
        to_huggingface(GPTModel(TWO))
    with pytest.raises(ValueError, match="splice beside mtp"):
        GPTModel(TWO)(*batch(0), splice=object())
    eye = VisionConfig(patch_size=4, hidden_size=16, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="mtp of the language model is MultiTokenPrediction"):
        VisionLanguageModel(eye, TWO, image_token=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"]
)
def test_pipelines_equal_one_process(schedule, tied):
    config = replace(TWO, num_layers=4, tie_embeddings=tied)
    mesh = ParallelLayout(pp=2).build(device_type())
    whole = OneProcess(config, "fp64", 1)
    model = OnMesh(config, "fp64", mesh, schedule, 0, False)
    for step in range(3):
        wanted, found = whole.step(*batch(step)), model.step(*batch(step))
        torch.testing.assert_close(found.double(), wanted.double(), rtol=1e-5, atol=0)
    assert_equal(
        model.parameters(), dict(whole.model.named_parameters()), model.roles, mesh, "fp64"
    )


@pytest.mark.ranks(2)
def test_a_pipeline_refuses_what_its_last_stage_cannot_embed():
    mesh = ParallelLayout(pp=2).build(device_type())
    for changes in ({"positions": "learned"}, {"embedding_norm": True}):
        model = GPTModel(replace(TWO, **changes), mesh, seed=1)
        with pytest.raises(ValueError, match=r"beside mtp=MultiToken.* the last stage has no copy"):
            pipeline(model, mesh, num_microbatches=2)
