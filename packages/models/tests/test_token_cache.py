"""Generation with a cache: the logits of whole sequences, and transformers' tokens."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lamina.collectives import Ledger
from lamina.fsdp import fully_shard
from lamina.mesh import ParallelLayout
from lamina.models import (
    AttentionScores,
    GPTModel,
    LatentAttention,
    LayerSpec,
    MambaConfig,
    MoEConfig,
    SelfAttention,
    TransformerConfig,
    generate,
    huggingface_config,
    to_huggingface,
)
from lamina.models.attention import GatedAttention, RopeScaling, SparseLatentAttention
from lamina.models.attention.context import TokenCache
from lamina.models.mamba import Mamba2, ShortConvolution
from lamina_testing import device_type

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=48,
    max_sequence_length=64,
)  # fmt: skip
LATENT = LatentAttention(
    kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)
CHOSEN = SparseLatentAttention(
    kv_lora_rank=16, q_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    top_k=6, index_heads=8, index_width=8,
)  # fmt: skip
GROWING = RopeScaling(kind="yarn", factor=4.0, original_length=6, query_beta=0.5)
CONFIGS = {
    "grouped heads": CONFIG,
    "window": replace(CONFIG, sliding_window=5),
    "window of one": replace(CONFIG, sliding_window=1),
    "windows by layer": replace(CONFIG, layers=(LayerSpec(sliding_window=4),) * 2 + (LayerSpec(),)),
    "growing queries": replace(CONFIG, rope_scaling=GROWING),
    "learned positions": replace(CONFIG, positions="learned"),
    "experts": replace(CONFIG, moe=MoEConfig(num_experts=4, top_k=2, ffn_size=16)),
    "scores": replace(
        CONFIG, scores=AttentionScores(softcap=2.0, sinks=True, linear_bias=True), sliding_window=7
    ),
    "gates": replace(CONFIG, attention=GatedAttention()),
    "latents": replace(CONFIG, num_kv_heads=None, mla=LATENT),
    "chosen keys": replace(CONFIG, num_kv_heads=None, mla=CHOSEN),
    "latents, window": replace(CONFIG, num_kv_heads=None, mla=LATENT, sliding_window=5),
    "short convolutions": replace(
        CONFIG, layers=(LayerSpec(attention=ShortConvolution()), LayerSpec()) * 2, num_layers=4
    ),
    "mamba in the place of attention": replace(
        CONFIG, attention=Mamba2(),
        mamba=MambaConfig(state_size=8, head_dim=8, groups=2, chunk_size=8),
    ),
    "mamba": replace(
        CONFIG, layer_pattern="MM*-M", num_layers=5,
        mamba=MambaConfig(state_size=8, head_dim=8, groups=2, chunk_size=8),
    ),
}  # fmt: skip
TOKENS = torch.arange(40).view(2, 20) * 7 % 50


def by_token(model, tokens, prompt):
    """Logits of a prompt, then of one token after the other."""
    cache = TokenCache()
    parts = [tokens[:, :prompt], *tokens[:, prompt:].split(1, dim=1)]
    return torch.cat([model(part, cache=cache) for part in parts], dim=1)


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 9])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_with_a_cache_are_those_of_the_whole_sequence(name, prompt):
    model = GPTModel(CONFIGS[name], seed=1).eval()
    assert model.caches
    found, wanted = by_token(model, TOKENS, prompt), model(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    # In fp64 nothing but the mathematics is left, also with weights ten times as large.
    large = GPTModel(replace(CONFIGS[name], init_std=0.2), seed=1).double().eval()
    found, wanted = by_token(large, TOKENS, prompt), large(TOKENS)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


@torch.no_grad()
@pytest.mark.ranks(2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["grouped heads", "latents", "chosen keys", "mamba", "experts"])
def test_ranks_of_tp_write_what_one_process_writes(name, sequence_parallel, ranks):
    experts = {} if sequence_parallel or name != "experts" else {"expert_tp": 2}
    mesh = ParallelLayout(tp=2, **experts).build(device_type())
    config = replace(CONFIGS[name], init_std=0.2, sequence_parallel=sequence_parallel)
    wanted = GPTModel(replace(config, sequence_parallel=False), seed=1).double()
    model = GPTModel(config, mesh, seed=1).double()
    tokens = TOKENS.to(device_type())
    for prompt in (tokens[:, :5], tokens[:1, :4]):  # one row is repeated where ranks share tokens
        with mock.patch.object(GPTModel, "caches", False):
            expected = generate(wanted, prompt, 8, temperature=0.0)
        assert torch.equal(generate(model, prompt, 8, temperature=0.0), expected)


class Operators(TorchDispatchMode):
    """Counts torch's operators."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def test_a_token_takes_few_operators():
    model = GPTModel(replace(CONFIG, num_kv_heads=None), seed=1)
    counts = []
    for tokens in (10, 11):
        with Operators() as operators:
            generate(model, TOKENS[:1, :5], tokens, temperature=0.0)
        counts.append(operators.count)
    # It was 87 a layer. A loop by hand takes about 30 (`benchmarks/generation.py`).
    assert counts[1] - counts[0] <= 20 + 45 * CONFIG.num_layers


@torch.no_grad()
@pytest.mark.parametrize("name", ["windows by layer", "latents", "experts", "mamba"])
def test_a_cache_can_ask_for_the_last_logits_alone(name):
    model, cache = GPTModel(CONFIGS[name], seed=1).eval(), TokenCache(last_only=True)
    found = model(TOKENS[:, :9], cache=cache)
    assert found.shape == (2, 1, 50)
    torch.testing.assert_close(found, model(TOKENS[:, :9])[:, -1:], rtol=0, atol=2e-6)


@torch.no_grad()
def test_positions_of_ones_own_are_those_that_the_caller_counts():
    model, cache = GPTModel(CONFIG, seed=1).eval(), TokenCache()
    places = torch.arange(20) * 2
    parts = [slice(0, 9), *(slice(at, at + 1) for at in range(9, 20))]
    found = [model(TOKENS[:, at], positions=places[at], cache=cache) for at in parts]
    torch.testing.assert_close(
        torch.cat(found, 1), model(TOKENS, positions=places), rtol=0, atol=2e-6
    )


@pytest.mark.parametrize("name", ["windows by layer", "experts", "mamba"])
def test_a_model_trains_on_what_it_wrote_as_if_it_had_written_nothing(name):
    models = [GPTModel(CONFIGS[name], seed=1) for _ in range(2)]
    written = generate(models[0], TOKENS[:, :5], 8, temperature=0.0)
    for model in models:
        model(written[:, :-1], written[:, 1:]).backward()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine.grad, other.grad)


@pytest.mark.ranks(2)
def test_a_sharded_model_is_gathered_once(ranks):
    plain = GPTModel(replace(CONFIG, init_std=0.2), seed=1)
    model = fully_shard(GPTModel(replace(CONFIG, init_std=0.2), seed=1))
    prompt = TOKENS[:, :5].to(device_type())
    with Ledger() as ledger:
        found = generate(model, prompt, 8, temperature=0.0)
    assert torch.equal(found, generate(plain, prompt, 8, temperature=0.0))
    gathers = [record for record in ledger.records if record.op.startswith("all_gather")]
    units = len(model.sharding_engine.units)
    assert 0 < len(gathers) <= units, "some unit was gathered for more than one token"
    here = sum(p.to_local().numel() for p in model.parameters())
    assert here < 0.6 * plain.num_parameters(), "whole weights are given back at the end"
    for each in (plain, model):  # and it trains on what it wrote
        each(found[:, :-1], found[:, 1:]).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), wanted[name], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_context_that_ends_is_read_as_before():
    model = GPTModel(replace(CONFIG, init_std=0.2), seed=1).double()
    with mock.patch.object(GPTModel, "caches", False):
        wanted = generate(model, TOKENS[:, :5], 12, temperature=0.0, context_length=9)
    assert torch.equal(
        generate(model, TOKENS[:, :5], 12, temperature=0.0, context_length=9), wanted
    )


class OwnAttention(SelfAttention):
    """A user's: what it keeps between tokens is not known."""


def test_what_says_nothing_of_later_tokens_is_computed_whole():
    model = GPTModel(CONFIG, seed=1)
    model.blocks[1].attention = OwnAttention(CONFIG)
    assert not model.caches
    assert GPTModel(replace(CONFIG, invariant=True)).caches
    assert not GPTModel(replace(CONFIG, invariant=True, sliding_window=4)).caches
    assert not GPTModel(replace(CONFIG, moe=MoEConfig(
        num_experts=4, top_k=2, ffn_size=16, capacity_factor=1.0))).caches  # fmt: skip
    calls = []
    model.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[1]))
    generate(model, TOKENS[:, :5], 3)
    assert calls == [5, 6, 7]
    OwnAttention.caches = True
    assert model.caches, "a class may say so itself"
    del OwnAttention.caches
    model.blocks[1].attention = SelfAttention(CONFIG)
    generate(model, TOKENS[:, :5], 3)
    assert calls[3:] == [5, 1, 1]


def test_blocks_that_are_compiled_are_not_compiled_for_each_length():
    model, plain = (GPTModel(replace(CONFIG, init_std=0.2), seed=1) for _ in range(2))
    compiled = []
    for block in model.blocks:
        block.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)
    found = generate(model, TOKENS[:, :5], 4, temperature=0.0)
    assert torch.equal(found, generate(plain, TOKENS[:, :5], 4, temperature=0.0))
    assert not compiled


@torch.no_grad()
@pytest.mark.parametrize("name", ["grouped heads", "latents"])
def test_greedy_and_sampled_tokens_are_transformers(name):
    transformers = pytest.importorskip("transformers")
    model = GPTModel(replace(CONFIGS[name], init_std=0.2), seed=1).eval()
    written = huggingface_config(model.config)
    config = transformers.AutoConfig.for_model(written.pop("model_type"), **written)
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(to_huggingface(model), strict=False)
    prompt = TOKENS[:, :6]
    options = {"max_new_tokens": 10, "min_new_tokens": 10, "pad_token_id": 0}
    options |= {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(
        generate(model, prompt, 10, temperature=0.0), theirs.generate(prompt, **options)
    )
    options |= {"do_sample": True, "top_k": 7, "temperature": 0.8}
    torch.manual_seed(5)
    wanted = theirs.generate(prompt, **options)
    torch.manual_seed(5)
    assert torch.equal(generate(model, prompt, 10, top_k=7, temperature=0.8), wanted)


@pytest.mark.parametrize("window", [None, 1, 5, 200])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_cache_holds_the_tokens_so_far_in_any_number_of_blocks(window, gradients):
    whole = torch.randn(2, 300, 3, requires_grad=gradients)
    cache, end = TokenCache(), 0
    with torch.set_grad_enabled(gradients):
        for length in (7, *[1] * 293):
            end += length
            (found,) = cache.extended((whole[:, end - length : end],), window)
            cache.end_forward(length)
            first = 0 if window is None or end == 7 else max(0, end - window)
            assert torch.equal(found, whole[:, first:end])
    assert found.requires_grad == gradients


@torch.no_grad()
def test_a_cache_writes_into_nothing_of_the_caller():
    prompt = torch.ones(1, 4, 3)
    cache = TokenCache()
    (first,) = cache.extended((prompt,), None)
    cache.end_forward(4)
    (second,) = cache.extended((torch.zeros(1, 1, 3),), None)
    cache.end_forward(1)
    cache.extended((torch.full((1, 1, 3), 2.0),), None)
    assert torch.equal(prompt, torch.ones(1, 4, 3))
    assert torch.equal(first, prompt)
    assert torch.equal(second, torch.cat((prompt, torch.zeros(1, 1, 3)), 1))


@pytest.mark.parametrize("invariant", [False, True])
@torch.no_grad()
def test_several_tokens_after_the_first_forward_are_refused_and_lose_nothing(invariant):
    config = TransformerConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, invariant=invariant
    )
    model, cache = GPTModel(config, seed=1), TokenCache()
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    model(tokens[:, :9], cache=cache)
    with pytest.raises(ValueError, match="3 tokens a row, and the TokenCache has 9 before them"):
        model(tokens[:, 9:], cache=cache)
    last = [model(tokens[:, [place]], cache=cache) for place in (9, 10, 11)]
    torch.testing.assert_close(torch.cat(last, 1), model(tokens)[:, 9:])
