"""The adapter's calls fit Transformer Engine's own signatures; its layers fit our models."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from lamina.mesh import ParallelLayout, role_of
from lamina.models import (
    GPTModel,
    Precision,
    PrecisionUnavailableError,
    TransformerConfig,
    apply_recompute,
)
from lamina.models.decoder.transformer_engine import make_recipe
from lamina_testing import device_type

from .transformer_engine_sources import KEPT, RECIPES, signatures, stand_in, wheel

CONFIG = TransformerConfig(
    vocab_size=48, hidden_size=32, num_layers=3, num_heads=2, ffn_size=48, max_sequence_length=32,
    mlp_bias=True, precision=Precision(backend="transformer_engine", num_layers_at_end_in_bf16=1),
)  # fmt: skip
PLAIN = replace(CONFIG, precision=Precision())
TOKENS = torch.randint(0, 48, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def calls(monkeypatch):
    modules, seen = stand_in()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return seen


@pytest.mark.parametrize("meta", [False, True])
def test_a_model_keeps_names_roles_and_values(meta, calls):
    with torch.device("meta" if meta else "cpu"):
        model = GPTModel(CONFIG, seed=1)
    if meta:
        model.to_empty(device=device_type())
        model.init_weights()
    plain = GPTModel(PLAIN, seed=1)
    pairs = zip(model.named_parameters(), plain.named_parameters(), strict=True)
    for (name, parameter), (other, expected) in pairs:
        assert name == other
        assert torch.equal(parameter, expected), name
        assert role_of(parameter) == role_of(expected)
    assert len(calls.named("Linear")) == 2 * 4
    assert all(call["parallel_mode"] is None for call in calls.named("Linear"))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_blocks_run_inside_autocast_when_they_run_again_too(recompute, calls):
    model, plain = (apply_recompute(GPTModel(c, seed=1), recompute) for c in (CONFIG, PLAIN))
    depth = sys.modules["transformer_engine.pytorch"].autocast
    seen = []
    model.blocks[0].mlp.up.register_forward_pre_hook(lambda *_: seen.append(depth.depth))
    model.blocks[2].mlp.up.register_forward_pre_hook(lambda *_: seen.append(None))
    losses = [each(TOKENS, TOKENS) for each in (model, plain)]
    assert depth.depth == 0
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, expected.grad)
    assert seen[0] > 0, "not inside autocast"
    assert len([d for d in seen if d]) == (2 if recompute == "full" else 1)
    assert all(call["enabled"] is True for call in calls.named("autocast"))


@pytest.mark.parametrize(
    ("options", "recipe"),
    [
        ({"amax": "delayed", "history": 8}, "DelayedScaling"),
        ({}, "Float8CurrentScaling"),
        ({"scaling": "block"}, "Float8BlockScaling"),
        ({"scaling": "mxfp8"}, "MXFP8BlockScaling"),
        ({"scaling": "nvfp4"}, "NVFP4BlockScaling"),
    ],
)
def test_recipes_are_made_as_their_classes_allow(options, recipe, calls):
    assert recipe in RECIPES
    precision = Precision(backend="transformer_engine", quantized_weights=True, **options)
    make_recipe(precision)
    (made,) = calls.named(recipe)
    if recipe == "DelayedScaling":
        assert made["amax_history_len"] == 8
        assert made["fp8_format"] == "HYBRID"
    GPTModel(replace(CONFIG, precision=precision), seed=1)
    quantised = calls.named("quantized_model_init")
    assert len(quantised) == 3 * 4
    assert quantised[0]["recipe"][0] == recipe


@pytest.mark.ranks(2, backend="fake")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_are_cut_as_ours(sequence_parallel):
    modules, calls = stand_in()
    sys.modules.update(modules)
    try:
        mesh = ParallelLayout(tp=2).build(device_type())
        config = replace(CONFIG, sequence_parallel=sequence_parallel)
        model = GPTModel(config, mesh, seed=1)
        plain = GPTModel(replace(PLAIN, sequence_parallel=sequence_parallel), mesh, seed=1)
    finally:
        for name in modules:
            del sys.modules[name]
    for (name, parameter), expected in zip(
        model.named_parameters(), plain.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name
        assert role_of(parameter) == role_of(expected), name
    made = calls.named("Linear")
    assert [call["parallel_mode"] for call in made[:4]] == ["column", "row", "column", "row"]
    assert (made[2]["in_features"], made[2]["out_features"]) == (32, 2 * 48)
    assert {call["tp_size"] for call in made} == {2}
    assert {call["sequence_parallel"] for call in made} == {sequence_parallel}
    assert made[0]["tp_group"] is mesh.axis("tp").group


def test_without_transformer_engine_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with pytest.raises(PrecisionUnavailableError, match=r"lamina-models\[te\].*torch-fp8"):
        GPTModel(CONFIG)


@pytest.mark.slow
def test_the_signatures_kept_here_are_those_of_the_wheel():
    assert json.loads(KEPT.read_text()) == signatures(wheel())


def test_real_layers_train():
    pytest.importorskip("transformer_engine.pytorch", reason="transformer-engine is not installed")
    if not torch.cuda.is_available():
        pytest.skip("transformer-engine needs a GPU")
    with torch.device("cuda"):
        model = GPTModel(CONFIG, seed=1).to(torch.bfloat16)
    loss = model(TOKENS.cuda(), TOKENS.cuda())
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
