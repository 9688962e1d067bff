"""Sampling text: who draws, what is read, and what is left as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lamina.mesh import ParallelLayout, seed_everything
from lamina.models import GPTModel, TransformerConfig, generate
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=16, num_layers=1, num_heads=2, ffn_size=24, max_sequence_length=16
)
PROMPT = torch.arange(8).view(2, 4)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_ranks_of_one_sequence_sample_the_same_tokens(axis, ranks):
    mesh = ParallelLayout(**{axis: 2}).build(device_type())
    with seed_everything(3, mesh):
        model = GPTModel(CONFIG, mesh)
    # Along cp generators differ by now; along tp a user's may.
    generators = {"cp": None, "tp": torch.Generator(device_type()).manual_seed(ranks.rank)}
    prompt = PROMPT.to(device_type())
    found = generate(model, prompt, 8, generator=generators[axis])
    both = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(both, found)
    assert torch.equal(*both)
    assert found[:, 4:].unique().numel() > 4
    if axis == "cp":
        for length in (0, 3):
            with pytest.raises(
                ValueError, match=f"context_length is {length}: .* at least 4, into"
            ):
                generate(model, prompt, 1, context_length=length)
    for length in (-2, 0):
        with pytest.raises(ValueError, match=f"context_length is {length}: .* at least"):
            generate(GPTModel(CONFIG), prompt, 1, context_length=length)


def test_every_module_goes_back_to_its_own_mode(monkeypatch):
    model = GPTModel(CONFIG, seed=0)
    model.blocks[0].mlp.eval()
    modes = [module.training for module in model.modules()]
    generate(model, PROMPT, 1)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(ValueError, match="at least one token"):
        generate(model, PROMPT[:, :0], 1)
    # One that fails, too.
    monkeypatch.setattr(model.blocks[0], "forward", None)
    with pytest.raises(TypeError):
        generate(model, PROMPT, 1)
    assert [module.training for module in model.modules()] == modes
    assert model.training
    assert not model.blocks[0].mlp.training


def test_a_context_is_the_last_tokens():
    model = GPTModel(replace(CONFIG, init_std=0.5), seed=0)
    out = generate(model, PROMPT, 3, temperature=0.0, context_length=2)
    for place in range(4, 7):
        with torch.no_grad():
            expected = model(out[:, place - 2 : place])[:, -1].argmax(-1)
        assert torch.equal(out[:, place], expected)
