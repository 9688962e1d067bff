"""`TransformerConfig(invariant=True)`: one set of bits for every layout, and what it refuses."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, replace

import pytest
import torch

from lamina.mesh.engine import MeshAxis
from lamina.models import (
    AttentionScores,
    GPTModel,
    LayerPart,
    LayerSpec,
    Precision,
    RecomputePolicy,
    TransformerConfig,
    apply_precision,
    apply_recompute,
)
from lamina.models.attention import GatedAttention
from lamina.models.attention.context import TokenCache
from lamina.models.attention.context_parallel import check_context_parallel

from .invariant_layouts import MODELS, Layout, hashes_alone, sha256, train

SHAPE = {"vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"tp_reduction": "native"}, "tp_reduction='native'"),
        ({"precision": Precision(backend="torch-fp8")}, "precision='torch-fp8'"),
        ({"precision": Precision(backend="transformer_engine")}, "precision='transformer_engine'"),
        ({"attention_path": "sdpa"}, "attention_path='sdpa'"),
        ({"logit_softcap": 30.0}, "logit_softcap=30.0"),
        ({"head_bias": True}, "head_bias=True"),
        ({"scores": AttentionScores(softcap=50.0)}, "scores="),
        ({"tie_embeddings": True}, "tie_embeddings=True"),
    ],
)
def test_what_has_no_order_of_the_model_is_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=f"invariant=True beside {message}"):
        TransformerConfig(**SHAPE, invariant=True, **setting)
    TransformerConfig(**SHAPE, invariant=False, **setting)


def test_a_gate_of_a_whole_head_is_refused():
    with pytest.raises(ValueError, match=r"invariant=True beside GatedAttention\(each='head'\)"):
        TransformerConfig(**SHAPE, invariant=True, attention=GatedAttention(each="head"))


def test_the_layers_of_a_model_share_the_setting():
    with pytest.raises(ValueError, match="invariant cannot be that of one layer"):
        LayerSpec(invariant=True)


def text(rows=4, length=64):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(43, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def test_precisions_with_scales_are_refused_afterwards_too():
    model = GPTModel(MODELS["grouped"])
    with pytest.raises(ValueError, match=r"torch-fp8.*blocks.0.attention.qkv.*invariant=True"):
        apply_precision(model, Precision(backend="torch-fp8"))
    apply_precision(model, Precision(backend="torch"))


def test_layers_that_cannot_are_refused_by_name():
    class Factor(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(()))

    @dataclass(frozen=True, kw_only=True)
    class FactorPart(LayerPart):
        def make(self, config, mesh=None):
            return Factor()

        def parameters(self, config):
            return 1

    with pytest.raises(NotImplementedError, match=r"blocks.0.mlp \(Factor\).*fix_sums"):
        GPTModel(replace(MODELS["grouped"], mlp=FactorPart()))


def test_autocast_is_refused():
    model = GPTModel(MODELS["grouped"])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
        model(text()[0])


def test_recomputed_norms_are_refused_where_their_gradients_would_be_rounded():
    model = apply_recompute(GPTModel(MODELS["grouped"]), RecomputePolicy(kind="selective"))
    model(text()[0])
    with pytest.raises(ValueError, match=r"RMSNorm.*operations=\('attention', 'activation'\)"):
        model.bfloat16()(text()[0])


def test_ulysses_with_copies_of_key_heads_is_refused():
    config = replace(MODELS["grouped"], num_kv_heads=1, context_parallel="ulysses")
    axis = MeshAxis("cp", 2, 0, (0, 1), None)
    with pytest.raises(ValueError, match=r"'ulysses' copies 1 key heads"):
        check_context_parallel(config, axis, 1)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_same_model(name):
    """Logits, loss and gradients are those of torch's kernels but for rounding."""
    results = []
    for invariant in (False, True):
        model = GPTModel(replace(MODELS[name], invariant=invariant), seed=1)
        tokens, labels = text()
        loss = model(tokens, labels)
        loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters()}
        results.append((loss.detach(), model(tokens).detach(), gradients))
    (loss, logits, gradients), (our_loss, our_logits, ours) = results
    torch.testing.assert_close(our_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(our_logits, logits, rtol=0, atol=1e-4)
    for parameter, gradient in gradients.items():
        largest = gradient.abs().max().item()
        assert (ours[parameter] - gradient).abs().max().item() < 1e-4 * largest, parameter


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_tokens_logits_do_not_depend_on_batch_padding_packing_or_later_tokens(name, dtype):
    model = GPTModel(MODELS[name], seed=1).to(dtype)
    tokens = text()[0]
    whole = model(tokens)
    for row, end in [(0, 1), (2, 17), (3, 64)]:
        assert torch.equal(model(tokens[row : row + 1, :end])[0], whole[row, :end])
    packed = torch.cat((tokens[0, :30], tokens[1, :34]))[None]
    ids = torch.cat((torch.zeros(30), torch.ones(34)))[None].long()
    logits = model(packed, document_ids=ids)
    assert torch.equal(logits[0, :30], whole[0, :30])
    assert torch.equal(logits[0, 30:], whole[1, :34])
    # The loss, in chunks of any size, sees the logits of evaluation.
    losses = model(tokens[:1], tokens[1:2]).item()
    expected = torch.nn.functional.cross_entropy(whole[0].float(), tokens[1]).item()
    assert abs(losses - expected) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "whole"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_gives_the_logits_of_the_whole_sequence(name, dtype):
    model = GPTModel(MODELS[name], seed=1).to(dtype)
    assert model.caches
    tokens, cache, last = text()[0], TokenCache(), TokenCache(last_only=True)
    whole, start = model(tokens).detach(), 9  # as in training, and below as in `generate`
    with torch.inference_mode():
        assert torch.equal(model(tokens[:, :start], cache=cache), whole[:, :start])
        assert torch.equal(model(tokens[:, :start], cache=last)[:, 0], whole[:, start - 1])
        for place in range(start, tokens.shape[1]):
            assert torch.equal(model(tokens[:, [place]], cache=cache)[:, 0], whole[:, place])


def test_windows_are_not_cached():
    assert not GPTModel(MODELS["whole"]).caches


def test_without_the_setting_nothing_of_it_runs():
    """No function of the folder is entered in a step, so bits and speed are those without it."""
    for config in MODELS.values():
        model = GPTModel(replace(config, invariant=False))
        entered = set()

        def note(frame, event, argument, entered=entered):
            if event == "call" and "/models/invariance/" in frame.f_code.co_filename:
                entered.add(frame.f_code.co_name)

        tokens, labels = text()
        sys.setprofile(note)
        threading.setprofile(note)
        try:
            model(tokens, labels).backward()
            model(tokens).sum().backward()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        assert not entered


# Of each kind of layout at least one; the whole product is slow.
FEW = (
    ("grouped", Layout(microbatches=4), torch.float32),
    ("latent", Layout(recompute="full", chunk=70, microbatches=2), torch.bfloat16),
    ("grouped", Layout(dp=2), torch.bfloat16),
    ("gpt2", Layout(dp=2, ddp=True, strategy=1), torch.float32),
    ("whole", Layout(tp=2), torch.bfloat16),
    ("gpt2", Layout(tp=2, sp=True), torch.bfloat16),
    ("latent", Layout(tp=2, sp=True, microbatches=2), torch.float32),
    ("gated", Layout(cp=2), torch.float32),
    ("whole", Layout(cp=2, way="ulysses"), torch.float32),
    ("gpt2", Layout(pp=2, microbatches=2), torch.float32),
    ("latent", Layout(tp=2, sp=True, cp=2), torch.bfloat16),
    ("growing queries", Layout(tp=2, sp=True, cp=2), torch.float32),
    ("gated", Layout(tp=2, sp=True, cp=2), torch.float32),  # a norm before the first block
    ("grouped", Layout(tp=2, sp=True, pp=2, microbatches=2), torch.float32),
)
STEPS = 2


@pytest.fixture(scope="module")
def alone(rank_server):
    """The hash of one rank after some steps, of each model and dtype."""
    cases = sorted({(model, dtype) for model, _, dtype in FEW}, key=str)
    hashes = rank_server.call(hashes_alone, init=True, cases=cases, steps=STEPS)
    return dict(zip(cases, hashes, strict=True))


def few(ranks):
    cases = [case for case in FEW if case[1].ranks == ranks]
    names = [f"{model}-{layout}-{str(dtype)[6:]}" for model, layout, dtype in cases]
    return pytest.mark.parametrize(("model", "layout", "dtype"), cases, ids=names)


@few(1)
@pytest.mark.ranks(1, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_one_rank_has_the_same_bits_however_it_steps(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]


@few(2)
@pytest.mark.ranks(2, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_two_ranks_have_the_bits_of_one(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]


@few(4)
@pytest.mark.ranks(4, backend="gloo")  # a GPU has other bits: tests/virtual_gpu/test_invariance.py
def test_four_ranks_have_the_bits_of_one(model, layout, dtype, alone):
    assert sha256(train(model, layout, dtype, STEPS)) == alone[model, dtype]
