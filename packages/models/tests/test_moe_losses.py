"""What auxiliary losses weigh beside the user's loss, also compiled and with frozen routers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.ddp import finalize_grads, full_gradients
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    GPTModel,
    MoEConfig,
    MoELayer,
    RoutingContext,
    TransformerBlock,
    TransformerConfig,
    VisionConfig,
    VisionLanguageModel,
)
from lamina_testing import device_type

MOE = MoEConfig(num_experts=4, top_k=2, ffn_size=8)
CONFIG = TransformerConfig(
    vocab_size=32, hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, init_std=0.3, moe=MOE
)
LOSSES = {"switch_loss": 0.1, "sequence_loss": 0.2, "global_loss": 0.1, "z_loss": 0.02}
TOKENS = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(4))
IMAGE = 31


def with_losses(**more):
    return replace(CONFIG, moe=replace(MOE, **(LOSSES | more)))


def reader_of_images(moe):
    vision = VisionConfig(hidden_size=16, num_layers=1, num_heads=2, patch_size=4, max_grid=8)
    language = replace(CONFIG, moe=moe)
    return VisionLanguageModel(vision, language, image_token=IMAGE, seed=3).double()


def read(model, scale=None):
    """A forward and a backward, of the model's loss or of a scaled one made of its logits."""
    tokens = torch.tensor([[1, IMAGE, IMAGE, 2, 3, 4]])
    image = torch.rand(
        3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )  # two patches
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    if scale is None:
        model(tokens, [image], labels).backward()
        return
    model.auxiliary_scale = scale
    logits = model(tokens, [image])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    (scale * loss).backward()


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_the_users_loss_stays_plain_and_gradients_follow_its_scale():
    losses, gradients = {}, {}
    for name, (config, scale) in {
        "plain": (CONFIG, 1.0),
        "balanced": (with_losses(), 1.0),
        "half": (with_losses(), 0.5),
    }.items():
        model = GPTModel(config, seed=3).double()
        losses[name] = model(TOKENS[:, :-1], TOKENS[:, 1:])
        (losses[name] * scale).backward()
        gradients[name] = model.blocks[0].mlp.router.weight.grad
    assert torch.equal(losses["plain"], losses["balanced"])
    assert not torch.allclose(gradients["plain"], gradients["balanced"], rtol=1e-3)
    torch.testing.assert_close(2 * gradients["half"], gradients["balanced"])


def test_loads_of_the_last_step_balance_the_next_one_however_its_batch_is_cut():
    """The oracle is autograd through `E * sum(f * P)`, with f counted here."""
    x = torch.randn(4, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moe = replace(MOE, global_loss=0.5, global_loads="last_step")

    def stepped(layer, pieces):
        layer.zero_grad()
        for piece in x.chunk(pieces):
            context = RoutingContext()
            loss = layer(piece, context).sin().mean()
            context.scale.follow(loss, 1.0)
            (loss / pieces).backward()
        return layer.router.weight.grad.clone()

    def built(moe):
        torch.manual_seed(1)
        return MoELayer(replace(CONFIG, moe=moe)).double()

    plain, layer = built(MOE), built(moe)
    assert torch.equal(stepped(plain, 1), stepped(layer, 1))  # no step has ended
    assert layer.router.needs_finalize
    layer.router.finalize_step(None)

    weight = plain.router.weight.detach().clone().requires_grad_()
    scores = (x.flatten(0, 1) @ weight.t()).softmax(-1)
    counts = torch.zeros(4, dtype=torch.float64)
    for row in scores.tolist():
        for expert in sorted(range(4), key=row.__getitem__)[-2:]:
            counts[expert] += 1
    assert layer.router.last_loads.tolist() == counts.tolist()
    (0.5 * 4 * (counts / counts.sum() * scores.mean(0)).sum()).backward()
    for pieces in (1, 2, 4):
        found = stepped(layer, pieces) - stepped(plain, pieces)
        torch.testing.assert_close(found, weight.grad, rtol=1e-9, atol=1e-12)

    again = built(moe)
    again.load_state_dict(layer.state_dict())  # a checkpoint has the loads
    assert torch.equal(stepped(again, 2), stepped(layer, 2))


def test_a_layer_in_the_users_own_model_follows_the_users_loss():
    x = torch.randn(2, 7, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(1)
    layer = MoELayer(with_losses()).double()
    layer(x).sin().mean().backward()  # what it weighs by default
    expected = gradients_of(layer)
    for followed in (True, False):
        layer.zero_grad()
        for _ in range(4):
            context = RoutingContext()
            loss = layer(x, context).sin().mean()
            if followed:
                context.scale.follow(loss, 1.0)
            (loss / 4).backward()
        found = gradients_of(layer)
        same = torch.allclose(found["router.weight"], expected["router.weight"], rtol=1e-9)
        assert same is followed
        torch.testing.assert_close(found["experts.up"], expected["experts.up"])


def test_a_loss_of_the_users_beside_images_is_told_by_the_whole_models_scale():
    model = reader_of_images(with_losses().moe)
    read(model)
    expected = gradients_of(model)
    model.zero_grad()
    read(model, 0.25)
    assert model.language.auxiliary_scale == 0.25
    for name, found in gradients_of(model).items():
        torch.testing.assert_close(4 * found, expected[name], rtol=1e-9, atol=1e-12)


def test_a_frozen_router_keeps_its_bias_and_asks_for_no_end_of_the_step():
    free, frozen = (GPTModel(with_losses(bias_rate=0.1), seed=3).double() for _ in range(2))
    for block in frozen.blocks:
        block.mlp.router.requires_grad_(False)
    for model in (free, frozen):
        model(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    expected = gradients_of(free)
    for name, found in gradients_of(frozen).items():
        assert torch.equal(found, expected.pop(name)), name
    assert {name.rpartition("mlp.")[2] for name in expected} == {"router.weight"}
    moved, kept = (model.blocks[0].mlp.router for model in (free, frozen))
    assert kept.needs_finalize  # for the global loss
    for router in (moved, kept):
        router.finalize_step(None)
    assert moved.expert_bias.any()
    assert not kept.expert_bias.any()
    assert kept.latest.forwards == 1
    alone = MoELayer(replace(CONFIG, moe=replace(MOE, bias_rate=0.1))).requires_grad_(False)
    alone(torch.randn(1, 4, 16))
    assert not alone.router.needs_finalize


def test_auxiliary_losses_of_a_frozen_decoder_push_what_comes_before_it():
    projected = {}
    for name, moe in {"plain": MOE, "balanced": with_losses(bias_rate=0.1).moe}.items():
        model = reader_of_images(moe).freeze("language")
        read(model)
        projected[name] = gradients_of(model)["projector.up.weight"]
        router = model.language.blocks[0].mlp.router
        assert router.weight.grad is None
        router.finalize_step(None)
        assert router.expert_bias is None or not router.expert_bias.any()
    assert not torch.allclose(*projected.values(), rtol=1e-3)


@pytest.mark.slow
def test_a_compiled_model_with_experts_trains_as_it_does_uncompiled():
    """Half a loss twice, in two steps: what is known in backward only is no constant."""
    config = replace(with_losses(bias_rate=0.1), num_layers=1)
    plain, model = (GPTModel(config, seed=3).double() for _ in range(2))
    compiled = torch.compile(model, backend="eager")
    for step in range(2):
        for run in (plain, compiled):
            for _ in range(2):
                tokens = TOKENS.roll(step, 1)
                (run(tokens[:, :-1], tokens[:, 1:]) / 2).backward()
        expected = gradients_of(plain)
        for name, found in gradients_of(model).items():
            torch.testing.assert_close(
                found, expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
            )
        for one, other in zip(plain.blocks, model.blocks, strict=True):
            for block in (one, other):
                assert block.mlp.router.totals.forwards == 2
                block.mlp.router.finalize_step(None)
            assert torch.equal(one.mlp.router.expert_bias, other.mlp.router.expert_bias)


@pytest.mark.slow
@pytest.mark.ranks(2)
@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "whole"])
@pytest.mark.parametrize(
    "transport",
    [{}, {"dispatcher": "all_gather"}, {"capacity_factor": 1.0, "pad_to_capacity": True}],
    ids=str,
)
def test_experts_over_ranks_train_compiled_as_they_do_uncompiled(transport, blocks, ranks):
    mesh = ParallelLayout(ep=2).build(device_type())
    config = with_losses(bias_rate=0.1, shared_ffn_size=8, **transport)
    tokens = TOKENS.roll(ranks.rank, 1)
    found = []
    for compiled in (False, True):
        model = GPTModel(config, mesh, seed=3).double()
        for block in model.blocks if compiled and blocks else ():
            block.compile(backend="aot_eager")
        model = fully_shard(model, device_mesh=mesh, fsdp_unit_modules=[TransformerBlock])
        whole = compiled and not blocks
        run = torch.compile(model, backend="aot_eager") if whole else model
        with model.no_sync():
            (run(tokens[:, :-1], tokens[:, 1:]) / 2).backward()
        (run(tokens[:, :-1], tokens[:, 1:]) / 2).backward()
        finalize_grads(model, mesh)
        values = {**full_gradients(model), **dict(model.named_buffers())}
        found.append({name: value.clone() for name, value in values.items()})
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-9, atol=1e-12)
