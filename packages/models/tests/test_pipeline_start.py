"""Stages start with the whole model's weights, whoever draws them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.mesh import ParallelLayout
from lamina.models import GPTModel, TransformerConfig, pipeline

CONFIG = TransformerConfig(
    vocab_size=40, hidden_size=16, num_layers=4, num_heads=2, ffn_size=24, max_sequence_length=16,
    init_std=0.2,
)  # fmt: skip


@pytest.mark.ranks(2)
def test_a_model_on_the_meta_device_starts_with_the_whole_models_weights(ranks):
    mesh = ParallelLayout(pp=2).build("cpu")
    config = replace(CONFIG, tie_embeddings=True, positions="learned")
    with torch.device("meta"):
        model = GPTModel(config, mesh, seed=1)
    runner = pipeline(model, mesh, "interleaved_1f1b", 2, device="cpu")
    whole = GPTModel(config, seed=1)
    state = whole.state_dict()
    found = runner.state_dict()
    assert found.keys() < state.keys()
    for name, value in found.items():
        assert torch.equal(value, state[name]), name
    names = {name for name, _ in whole.named_parameters()}
    assert {name for name, _ in runner.named_parameters()} < names
    # A whole model's weights go to whichever stage has them.
    runner.load_state_dict({name: value + 1 for name, value in state.items()})
    for name, value in runner.state_dict().items():
        assert torch.equal(value, state[name] + 1), name


@pytest.mark.ranks(2)
def test_stages_that_would_draw_from_different_seeds_are_refused(ranks):
    mesh = ParallelLayout(pp=2).build("cpu")
    with torch.device("meta"):
        model = GPTModel(CONFIG, mesh, seed=ranks.rank)
    with pytest.raises(ValueError, match="different seeds"):
        pipeline(model, mesh, "1f1b", 2, device="cpu")
