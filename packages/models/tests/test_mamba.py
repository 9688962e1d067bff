"""Mamba-2: the layer, hybrid stacks, and transformers with the same weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from lamina.models import (
    AttentionBlock,
    ExpertBlock,
    GPTModel,
    MambaBlock,
    MambaConfig,
    MLPBlock,
    MoEConfig,
    RecomputePolicy,
    TransformerBlock,
    TransformerConfig,
    apply_recompute,
    config_from_huggingface,
    from_huggingface,
    huggingface_config,
    matrix_parameters,
    to_huggingface,
    training_flops_per_token,
)
from lamina_testing import Meter, device_type

SIZES = MambaConfig(state_size=8, head_dim=4, groups=2, chunk_size=8)
HYBRID = TransformerConfig(
    vocab_size=61,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    ffn_size=24,
    max_sequence_length=64,
    layer_pattern="M*M-",
    mamba=SIZES,
)
PURE = replace(HYBRID, num_layers=2, layer_pattern="MM", positions="none")


@pytest.mark.parametrize("groups", [1, 2])
def test_steps_equal_the_forward_of_a_block(groups):
    config = replace(PURE, mamba=replace(SIZES, groups=groups))
    torch.manual_seed(0)
    block = MambaBlock(config).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    expected, state = block(x), block.initial_state(2)
    for t in range(9):
        y, state = block.step(x[:, t], state)
        torch.testing.assert_close(y, expected[:, t])
    assert state.state.shape == (2, 8, 4, 8)


@pytest.mark.parametrize("config", [HYBRID, PURE], ids=["hybrid", "pure"])
def test_packed_documents_compute_what_they_would_alone(config):
    model = GPTModel(config, seed=1).double()
    tokens = torch.randint(0, 61, (1, 23), generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[4] * 7 + [9] * 11 + [4] * 5])
    packed = model(tokens, document_ids=ids)
    alone = torch.cat([model(part) for part in tokens.split([7, 11, 5], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


def test_autocast_reaches_the_scan():
    """Which decides by its input's dtype how it runs."""
    model, seen = GPTModel(PURE, seed=1), []
    for block in model.blocks:
        block.mixer.scan.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[:4]))
    tokens = torch.randint(61, (2, 20), generator=torch.Generator().manual_seed(0))
    expected = model(tokens).detach()
    seen.clear()
    with torch.autocast(device_type(), torch.bfloat16):
        found = model(tokens)
    found.sum().backward()
    assert {tensor.dtype for tensor in seen} == {torch.bfloat16}
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    assert (found - expected).norm() < 2e-2 * expected.norm()


def test_a_later_token_changes_nothing_before_it():
    model = GPTModel(HYBRID, seed=1)
    tokens = torch.arange(20)[None]
    changed = tokens.clone()
    changed[0, 12] = 60
    difference = (model(tokens) - model(changed)).abs().sum(dim=-1)[0]
    assert not difference[:12].any()
    assert difference[12:].all()


def test_letters_spell_the_stack():
    moe = MoEConfig(num_experts=4, top_k=2, first_dense=4)
    model = GPTModel(replace(HYBRID, num_layers=5, layer_pattern="M*-TE", moe=moe), seed=0)
    kinds = [type(block) for block in model.blocks]
    assert kinds == [MambaBlock, AttentionBlock, MLPBlock, TransformerBlock, ExpertBlock]
    assert [type(b) for b in GPTModel(replace(HYBRID, layer_pattern=None, mamba=None)).blocks] == [
        TransformerBlock
    ] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_pattern": "M*MX"}, r"has \['X'\], which mean nothing: 'M' is a Mamba-2 layer"),
        ({"layer_pattern": "M*M"}, "has 3 letters, num_layers is 4"),
        ({"mamba": None}, "has 2 Mamba layers .letter 'M'., and no mamba is given"),
        ({"layer_pattern": "*-*-"}, "has 0 Mamba layers .letter 'M'., and mamba is given"),
        ({"layer_pattern": "M*ME"}, "has layers of experts .letter 'E'., and no moe is given"),
        ({"layer_pattern": None}, "say which layers are Mamba's, such as layer_pattern='MMMM'"),
        ({"mamba": replace(SIZES, head_dim=5)}, r"= 32 is not divisible by head_dim 5 \(rem.* 2\)"),
        ({"mamba": replace(SIZES, groups=3)}, r"8 heads are not divisible by groups 3 \(rem.* 2\)"),
    ],
)
def test_patterns_that_fit_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(HYBRID, **change)


@pytest.mark.parametrize("change", [{"state_size": 0}, {"dt_min": 0.2}, {"dt_limit": (1.0, 0.5)},
                                    {"path": "triton"}])  # fmt: skip
def test_sizes_out_of_range_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        MambaConfig(**change)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recomputation_changes_no_bit(policy):
    tokens = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    plain = GPTModel(HYBRID, seed=1)
    model = apply_recompute(GPTModel(HYBRID, seed=1), policy)
    for each in (plain, model):
        each(tokens[:, :-1], tokens[:, 1:]).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_what_a_scan_saves_can_be_computed_again():
    tokens = torch.randint(0, 61, (2, 64), generator=torch.Generator().manual_seed(0))
    kept = []
    for operations in ((), ("scan",), ("norm", "scan")):
        model = GPTModel(replace(PURE, hidden_size=32, max_sequence_length=128), seed=1)
        if operations:
            apply_recompute(model, RecomputePolicy(kind="selective", operations=operations))
        with Meter() as meter:
            before = meter.live_bytes()
            hidden = model(tokens)
            kept.append(meter.live_bytes() - before)
        del hidden
    assert kept[1] < 0.5 * kept[0]
    assert kept[2] < 0.35 * kept[0]


def test_rates_in_bfloat16_cost_little_beside_the_other_weights():
    """What `param_dtype=bfloat16` rounds: the error of the rates is below a tenth of all."""
    config = replace(PURE, hidden_size=32, max_sequence_length=512, init_std=0.1)
    tokens = torch.randint(0, 61, (2, 512), generator=torch.Generator().manual_seed(0))
    found = []
    for rounded in ((), (".A_log", ".dt_bias", ".D"), ("",)):
        model = GPTModel(config, seed=1).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(rounded):
                    parameter.copy_(parameter.bfloat16())
            found.append(model(tokens))
    exact, rates, every = found
    assert 0 < (rates - exact).norm() < 0.1 * (every - exact).norm()


def test_initial_weights_lie_in_their_ranges_and_depend_on_seed_and_name():
    config = replace(PURE, hidden_size=64, mamba=replace(SIZES, dt_min=0.01, dt_max=0.2))
    with torch.device("meta"):
        late = GPTModel(config, seed=3)
    late.to_empty(device=device_type()).init_weights()
    model = GPTModel(config, seed=3)
    for one, other in zip(model.parameters(), late.parameters(), strict=True):
        assert torch.equal(one, other)
    first, second = (block.mixer.scan for block in model.blocks)
    assert -16 <= first.rate.min() < first.rate.max() <= -1
    steps = first.steps(torch.zeros(32))
    assert 0.0099 < steps.min() < steps.max() < 0.201
    assert not torch.equal(first.A_log, second.A_log)
    limited = MambaBlock(replace(config, mamba=replace(config.mamba, dt_limit=(0.05, 0.1))))
    bounded = limited.mixer.scan.steps(torch.linspace(-9, 9, 32))
    assert bounded.min() >= 0.05
    assert bounded.max() <= 0.1


def test_costs_follow_the_letters():
    for config in (HYBRID, PURE, replace(HYBRID, layer_pattern="M*T-")):
        model = GPTModel(config, seed=0)
        names = ("input.weight", "output.weight", "conv.weight", "qkv.weight", "up.weight",
                 "down.weight", "head.weight")  # fmt: skip
        counted = sum(p.numel() for n, p in model.named_parameters() if n.endswith(names))
        assert matrix_parameters(config) == counted
    # Twice the tokens cost a Mamba stack nothing more each.
    assert training_flops_per_token(PURE, 64) == training_flops_per_token(PURE, 32)
    assert training_flops_per_token(HYBRID, 64) > training_flops_per_token(HYBRID, 32)


# ------------------------------------------------------------------ transformers

MAMBA2 = {
    "grouped": PURE,
    "biases": replace(PURE, mamba=replace(SIZES, bias=True, groups=1), tie_embeddings=True),
    "no convolution bias": replace(PURE, mamba=replace(SIZES, conv_bias=False, conv_kernel=3)),
    "bounded steps": replace(PURE, mamba=replace(SIZES, dt_limit=(0.02, 0.05)), vocab_multiple=8),
}


def theirs_of(config, weights):
    transformers = pytest.importorskip("transformers")
    written = huggingface_config(config)
    their_config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    model = transformers.AutoModelForCausalLM.from_config(their_config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def perturbed(config):
    """A model none of whose parameters is all zeros or ones."""
    model = GPTModel(config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


@pytest.mark.parametrize("name", list(MAMBA2))
def test_outputs_and_gradients_equal_transformers(name):
    config = MAMBA2[name]
    model = perturbed(config)
    theirs = theirs_of(config, to_huggingface(model))
    tokens = torch.randint(0, 61, (2, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    logits = theirs(tokens[:, :-1]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    expected = dict(theirs.named_parameters())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for their_name, gradient in to_huggingface(model, gradients).items():
        torch.testing.assert_close(
            gradient, expected[their_name].grad, rtol=1e-4, atol=1e-5,
            msg=lambda m, n=their_name: f"{n}: {m}",
        )  # fmt: skip


def test_a_saved_mamba2_is_read_and_its_config_survives(tmp_path):
    config = MAMBA2["biases"]
    theirs = theirs_of(config, to_huggingface(perturbed(config)))
    theirs.save_pretrained(tmp_path)
    model = from_huggingface(tmp_path).eval()
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    again = config_from_huggingface(huggingface_config(config))
    assert again.mamba == replace(config.mamba, num_heads=8)
    assert again.pattern == config.pattern


def test_stacks_that_transformers_lacks_are_refused():
    with pytest.raises(ValueError, match="layer_pattern 'M\\*M-' with positions 'rope'"):
        huggingface_config(HYBRID)


# ------------------------------------------------------------------ kernels
