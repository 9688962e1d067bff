"""Initial weights, the meta device, the loss, generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import mark, role_of
from lamina.models import (
    GPTModel,
    LayerNorm,
    RMSNorm,
    TransformerConfig,
    generate,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from lamina.models.engine import sample
from lamina_testing import Meter, device_type

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=32, num_layers=3, num_heads=4, max_sequence_length=64
)
VARIANTS = {
    "plain": CONFIG,
    "tied": replace(CONFIG, tie_embeddings=True),
    "gpt": replace(CONFIG, positions="learned", norm="layernorm", attention_bias=True,
                   mlp_bias=True, post_norm=True, qk_norm=True),
}  # fmt: skip


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_model_from_the_meta_device_has_the_same_weights(name):
    torch.manual_seed(0)
    expected = weights(GPTModel(VARIANTS[name]))
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPTModel(VARIANTS[name])
    model.to_empty(device=device_type())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    # In any order: a wrapper materialises unit by unit.
    for module in reversed(list(model.modules())):
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    found = weights(model)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert (model.head.weight is model.embedding.weight) == VARIANTS[name].tie_embeddings


def test_every_module_that_owns_parameters_can_reset_them():
    for config in VARIANTS.values():
        for name, module in GPTModel(config).named_modules():
            if list(module.parameters(recurse=False)):
                assert hasattr(module, "reset_parameters"), name


def test_weights_depend_on_seed_and_name_alone():
    few, many = GPTModel(CONFIG, seed=1), GPTModel(replace(CONFIG, num_layers=3), seed=1)
    assert all(map(torch.equal, few.parameters(), many.parameters()))
    other = GPTModel(CONFIG, seed=2)
    assert not torch.equal(few.blocks[0].mlp.up.weight, other.blocks[0].mlp.up.weight)
    assert not torch.equal(few.blocks[0].mlp.up.weight, few.blocks[1].mlp.up.weight)
    bigger = GPTModel(replace(CONFIG, vocab_size=70), seed=1)
    assert torch.equal(few.blocks[2].mlp.up.weight, bigger.blocks[2].mlp.up.weight)


def test_torch_manual_seed_decides_the_weights():
    for seeds, same in (((0, 0), True), ((0, 1), False)):
        models = []
        for seed in seeds:
            torch.manual_seed(seed)
            models.append(GPTModel(CONFIG))
        assert torch.equal(models[0].embedding.weight, models[1].embedding.weight) is same


def test_initial_weights_have_the_documented_spread():
    model = GPTModel(replace(CONFIG, hidden_size=256, init_std=0.05), seed=0)
    assert model.blocks[1].mlp.up.weight.std().item() == pytest.approx(0.05, rel=0.05)
    residual = model.blocks[1].mlp.down.weight.std().item()
    assert residual == pytest.approx(0.05 / 6**0.5, rel=0.05)


def test_roles_survive_leaving_the_meta_device():
    with torch.device("meta"):
        model = GPTModel(CONFIG)
    mark(model.final_norm.weight, tied="last")
    model.to_empty(device=device_type())
    assert role_of(model.final_norm.weight).tied == "last"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_the_loss_is_the_cross_entropy_of_the_logits(name, reduction):
    model = GPTModel(replace(VARIANTS[name], loss_chunk=7), seed=0).double()
    tokens, labels = torch.randint(0, 50, (2, 2, 11))
    labels[0, :4] = -100
    loss = model(tokens, labels, reduction=reduction)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction=reduction)
    torch.testing.assert_close(loss, expected)
    ours = torch.autograd.grad(0.5 * loss, list(model.parameters()))
    theirs = torch.autograd.grad(0.5 * expected, list(model.parameters()))
    torch.testing.assert_close(ours, theirs)


def test_no_labels_that_count_give_no_loss_and_no_gradient():
    model = GPTModel(CONFIG, seed=0)
    loss = model(torch.zeros(1, 5, dtype=torch.int64), torch.full((1, 5), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_cross_entropy_holds_no_fp32_copy_of_the_logits():
    torch.manual_seed(0)
    logits = torch.randn(256, 2048, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 2048, (256,))
    labels[3] = -100
    with Meter() as meter:
        before = meter.live_bytes()
        vocab_parallel_cross_entropy(logits, labels, chunk=16).sum().backward()
        rise = meter.peak_live_bytes - before
    # The gradient, and what a chunk needs.
    assert rise < logits.nbytes + 6 * 16 * 2048 * 4
    wide = logits.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(wide, labels, reduction="sum").backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-2, atol=1e-4)


def test_the_loss_never_holds_all_logits():
    tokens, vocabulary, width = 4096, 2048, 8
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    labels = torch.randint(0, vocabulary, (tokens,))
    with Meter() as meter:
        before = meter.live_bytes()
        linear_cross_entropy(hidden, weight, labels, chunk=256).backward()
    assert meter.peak_live_bytes - before < 0.4 * tokens * vocabulary * 4


def test_backward_gives_away_the_heads_gradient_and_copies_none():
    """Unless the graph is kept: then the next backward gives the same."""
    hidden, weight = (torch.randn(n, 64, requires_grad=True) for n in (4, 4096))
    labels = torch.randint(0, 4096, (4,))
    with Meter() as meter:
        before = meter.live_bytes()
        (linear_cross_entropy(hidden, weight, labels) * 0.5).backward()
        rise = meter.peak_live_bytes - before
    assert rise < 1.5 * weight.nbytes
    loss = linear_cross_entropy(hidden, weight, labels) * 0.5
    for _ in range(2):
        once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
        assert torch.equal(once[0], hidden.grad)
        assert torch.equal(once[1], weight.grad)


def test_a_rank_without_tokens_has_a_gradient_of_zeros():
    weight = torch.randn(8, 4, requires_grad=True)
    labels = torch.empty(0, dtype=torch.int64)
    linear_cross_entropy(torch.empty(0, 4), weight, labels).backward()
    assert weight.grad.tolist() == [[0.0] * 4] * 8


@pytest.mark.parametrize("bad", [-1, 50, 63, 64])
def test_ids_that_do_not_exist_are_refused_on_a_cpu(bad):
    model = GPTModel(replace(CONFIG, vocab_multiple=64), seed=0)
    tokens = torch.randint(0, 50, (2, 9))
    strange = tokens.clone()
    strange[1, 4] = bad
    message = rf"hold {bad} \(and 1 ids in all that do not exist\): they must be 0 to 49"
    with pytest.raises(ValueError, match="labels " + message):
        model(tokens, strange)
    with pytest.raises(ValueError, match="tokens " + message):
        model(strange, tokens)
    with pytest.raises(ValueError, match="labels " + message):
        linear_cross_entropy(torch.randn(18, 4), torch.randn(64, 4), strange.flatten(),
                             vocab_size=50)  # fmt: skip
    if not 0 <= bad < 64:
        with pytest.raises(ValueError, match="they must be 0 to 63"):
            vocab_parallel_cross_entropy(torch.randn(2, 9, 64), strange)


@pytest.mark.parametrize("bad", [-1, 50, 63, 64])
def test_labels_that_nobody_looks_at_make_the_loss_nan(bad, monkeypatch):
    """What a GPU computes, where looking at ids would mean waiting for them."""
    monkeypatch.setattr("lamina.models.layers.loss.check_ids", lambda *_: None)
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(64, 4, requires_grad=True)
    labels = torch.tensor([3, -100, bad, 7, 49, 0])
    loss = linear_cross_entropy(hidden, weight, labels, vocab_size=50, chunk=4)
    loss.backward()
    assert loss.isnan()
    assert hidden.grad.isnan().any(dim=1).tolist() == [False, False, True, False, False, False]
    assert not hidden.grad[1].any()
    logits = torch.randn(6, 50, requires_grad=True)
    losses = vocab_parallel_cross_entropy(logits, labels)
    losses.sum().backward()
    assert losses.isnan().tolist() == [False, False, True, False, False, False]
    assert logits.grad.isnan().any(dim=1).tolist() == losses.isnan().tolist()


def test_the_loss_factor_is_not_rounded_to_the_dtype_of_activations():
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (6, 8))
    loss = linear_cross_entropy(hidden, weight, torch.randint(0, 8, (6,)))
    (plain,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    (scaled,) = torch.autograd.grad(loss * 3000.0**-1, hidden)
    assert torch.equal(scaled, (plain.float() * 3000.0**-1).bfloat16())


def test_padding_ids_get_no_probability():
    model = GPTModel(replace(CONFIG, vocab_multiple=64), seed=0)
    tokens = torch.randint(0, 50, (2, 9))
    assert model.embedding.weight.shape[0] == 64
    assert model(tokens).shape == (2, 9, 50)
    model(tokens, tokens).backward()
    assert not model.head.weight.grad[50:].any()


ACTIVATIONS = {
    "relu2": lambda x: torch.where(x > 0, x * x, torch.zeros_like(x)),
    "gelu": lambda x: 0.5 * x * (1.0 + torch.erf(x / 2.0**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + torch.tanh(
        (2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "swiglu": lambda x: x[..., :24] / (1.0 + torch.exp(-x[..., :24])) * x[..., 24:],
}  # fmt: skip


def by_formula(weights, tokens, activation, post_norm):
    """Logits of a model without positions, by the formulas of the papers."""

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[name + ".weight"]

    def linear(x, name):
        return x @ weights[name + ".weight"].t()

    def after(x, name):
        return norm(x, name) if post_norm else x

    x = weights["embedding.weight"][tokens]
    for layer in ("blocks.0.", "blocks.1."):
        heads = linear(norm(x, layer + "attention_norm"), layer + "attention.qkv")
        query, key, value = heads.view(*tokens.shape, 3, 4, 8).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / 8**0.5
        seen = torch.ones(scores.shape[-2:]).tril().bool()
        attended = torch.where(seen, scores.exp(), torch.zeros_like(scores))
        attended = attended / attended.sum(-1, keepdim=True)
        mixed = torch.einsum("bhqk,bkhd->bqhd", attended, value).flatten(2)
        x = x + after(linear(mixed, layer + "attention.output"), layer + "attention_post_norm")
        inner = ACTIVATIONS[activation](linear(norm(x, layer + "mlp_norm"), layer + "mlp.up"))
        x = x + after(linear(inner, layer + "mlp.down"), layer + "mlp_post_norm")
    return linear(norm(x, "final_norm"), "head")


@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_model_without_positions_equals_its_formula(activation, post_norm):
    config = replace(CONFIG, num_layers=2, ffn_size=24, activation=activation, positions="none",
                     post_norm=post_norm, init_std=0.3)  # fmt: skip
    model = GPTModel(config, seed=0).double()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    tokens = torch.randint(0, 50, (2, 7))
    logits, expected = model(tokens), by_formula(weights, tokens, activation, post_norm)
    torch.testing.assert_close(logits, expected)
    weighing = torch.randn_like(logits)
    ours, theirs = (
        torch.autograd.grad((found * weighing).sum(), list(weights.values()))
        for found in (logits, expected)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_norms_equal_their_formulas(kind, dtype):
    torch.manual_seed(0)
    norm = kind(12).to(dtype)
    x = torch.randn(5, 7, 12, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(12))
    inputs = [x, *norm.parameters()]
    wide = [y.detach().double().requires_grad_() for y in inputs]
    centred = wide[0] - wide[0].mean(-1, keepdim=True) if kind is LayerNorm else wide[0]
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * wide[1]
    if kind is LayerNorm:
        expected = expected + wide[2]
    found = norm(x)
    assert found.dtype == dtype
    grad = torch.randn(5, 7, 12)
    ours = torch.autograd.grad(found, inputs, grad.to(dtype))
    theirs = torch.autograd.grad(expected, wide, grad.to(dtype).double())
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def test_generation_follows_the_most_likely_token():
    model = GPTModel(CONFIG, seed=0)
    prompt = torch.randint(0, 50, (2, 4))
    out = generate(model, prompt, 6, temperature=0.0)
    assert torch.equal(out[:, :4], prompt)
    with torch.no_grad():
        for place in range(4, 10):
            assert torch.equal(out[:, place], model(out[:, :place])[:, -1].argmax(-1))
    assert model.training


def test_generation_looks_back_no_further_than_the_model_can():
    model = GPTModel(replace(CONFIG, max_sequence_length=8), seed=0)
    assert generate(model, torch.zeros(1, 6, dtype=torch.int64), 5).shape == (1, 11)


def test_sampling_keeps_to_the_likeliest():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(200, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(sample(logits, top_k=2, generator=generator).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.7, generator=generator).tolist()) == {0, 1}
    assert set(sample(logits, top_p=0.1, generator=generator).tolist()) == {0}
    assert set(sample(logits, temperature=0.0).tolist()) == {0}
    assert set(sample(logits, generator=generator).tolist()) == {0, 1, 2, 3}


def test_shapes_that_do_not_fit_are_named():
    model = GPTModel(CONFIG, seed=0)
    tokens = torch.zeros(1, 65, dtype=torch.int64)
    with pytest.raises(ValueError, match="65 tokens is longer than max_sequence_length 64"):
        model(tokens)
    with pytest.raises(ValueError, match=r"tokens have shape \(65,\)"):
        model(tokens[0])
    with pytest.raises(TypeError, match=r"tokens are torch\.float32: ids are integers"):
        model(tokens[:, :5].float())
    with pytest.raises(ValueError, match=r"labels have shape \(1, 4\), tokens \(1, 5\)"):
        model(tokens[:, :5], tokens[:, :4])
