"""Attention gives the same numbers on every path, and documents do not see each other."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lamina.models import (
    AttentionContext,
    GPTModel,
    LatentAttention,
    RopeScaling,
    SelfAttention,
    TransformerBlock,
    TransformerConfig,
)
from lamina.models.attention import apply_rotary, choose_pattern, document_positions, rotary_tables
from lamina.models.attention import kernels as patterns

CONFIG = TransformerConfig(
    vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, max_sequence_length=64
)
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 13, [4] * 3 + [2] * 10 + [4] * 7])
TOKENS = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0))


def heads(batch=2, sequence=20, count=4, kv_count=2, width=8, dtype=torch.float64):
    torch.manual_seed(1)
    shapes = [(batch, sequence, n, width) for n in (count, kv_count, kv_count)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def written_out(query, key, value, window, documents):
    """Attention by loops over tokens."""
    batch, sequence, count, width = query.shape
    out = torch.zeros(batch, sequence, count, value.shape[-1], dtype=query.dtype)
    for b in range(batch):
        for i in range(sequence):
            first = i
            while (
                first > 0
                and (window is None or i - first + 1 < window)
                and (documents is None or documents[b, first - 1] == documents[b, i])
            ):
                first -= 1
            for h in range(count):
                kv = h * key.shape[2] // count
                scores = key[b, first : i + 1, kv] @ query[b, i, h] / math.sqrt(width)
                out[b, i, h] = scores.softmax(0) @ value[b, first : i + 1, kv]
    return out


def fake_varlen(query, key, value, starts, starts_k, longest, longest_k, *, scale, window_size,
                enable_gqa=False):  # fmt: skip
    """What torch's CUDA kernel does, document by document."""
    assert torch.equal(starts, starts_k)
    assert starts.dtype == torch.int32
    assert longest == longest_k == int(starts.diff().max())
    assert starts[-1] == query.shape[0]
    pieces = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        q, k, v = (x[start:stop].transpose(0, 1) for x in (query, key, value))
        n = stop - start
        distance = torch.arange(n)[:, None] - torch.arange(n)[None]
        mask = distance >= 0
        if window_size[0] >= 0:
            mask &= distance <= window_size[0]
        assert window_size[1] == 0
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        pieces.append(out.transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.matrix
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("path", ["auto", "sdpa", "varlen", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_path_equals_attention_by_loops(path, window, documents, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen)
    if path == "varlen":  # what stands in for the kernel runs here
        monkeypatch.setattr(patterns, "_what_varlen_lacks", lambda *_: None)
    config = replace(CONFIG, sliding_window=window, attention_path=path)
    query, key, value = (x.detach() for x in heads())
    with torch.no_grad():
        pattern = choose_pattern(config, TOKENS, torch.float64, documents)
        found = pattern(query, key, value, scale=config.score_scale, dropout=0.0)
    expected = written_out(query, key, value, window, documents)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("path", "device", "dtype", "change", "message"),
    [
        ("varlen", "cpu", torch.bfloat16, {}, "'varlen' has no kernel on cpu"),
        ("flex", "cpu", torch.float32, {}, "'flex' has no backward on cpu"),
        ("flex", "cuda", torch.float32, {}, "'flex' has no kernel on cuda for query heads of 8"),
        ("varlen", "cuda", torch.float32, {}, "'varlen' has no kernel for torch.float32"),
        ("varlen", "cuda", torch.bfloat16, {"head_dim": 512}, "heads of 512 and value heads"),
        ("varlen", "cuda", torch.bfloat16, {"num_kv_heads": None, "mla": LatentAttention(
            kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6)},
         "query heads of 8 and value heads of 6 elements"),
    ],
)  # fmt: skip
def test_a_path_that_cannot_do_the_case_is_refused(path, device, dtype, change, message):
    config = replace(CONFIG, attention_path=path, **change)
    tokens = SimpleNamespace(shape=(2, 20), device=torch.device(device))
    with pytest.raises(ValueError, match=f"{message}.*set attention_path to 'auto'"):
        choose_pattern(config, tokens, dtype, None)


@pytest.mark.parametrize("window", [None, 5])
def test_gradients_equal_those_of_attention_by_loops(window):
    config = replace(CONFIG, sliding_window=window)
    query, key, value = heads()
    weights = torch.randn(2, 20, 4, 8, dtype=torch.float64)
    pattern = choose_pattern(config, TOKENS, torch.float64, DOCUMENTS)
    found = pattern(query, key, value, scale=config.score_scale, dropout=0.0)
    expected = written_out(query, key, value, window, DOCUMENTS)
    ours = torch.autograd.grad((found * weights).sum(), (query, key, value))
    theirs = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"positions": "learned"},
        {"sliding_window": 4},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, original_length=8)},
        {"num_kv_heads": None, "mla": LatentAttention(
            kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6)},
    ],
)  # fmt: skip
def test_packed_documents_equal_documents_alone(change):
    model = GPTModel(replace(CONFIG, **change), seed=0).double()
    packed = model(TOKENS, document_ids=DOCUMENTS)
    for row, runs in enumerate(([(0, 7), (7, 20)], [(0, 3), (3, 13), (13, 20)])):
        for start, stop in runs:
            alone = model(TOKENS[row : row + 1, start:stop])
            torch.testing.assert_close(packed[row, start:stop], alone[0])


def test_positions_restart_in_each_document():
    expected = [[*range(7), *range(13)], [*range(3), *range(10), *range(7)]]
    assert document_positions(DOCUMENTS).tolist() == expected


def test_a_window_is_what_a_token_sees():
    model = GPTModel(replace(CONFIG, sliding_window=3, num_layers=1), seed=0)
    changed = TOKENS.clone()
    changed[0, 10] += 1
    changed[0, 10] %= 50
    with torch.no_grad():
        differs = (model(TOKENS) != model(changed))[0].any(-1)
    assert differs.nonzero().flatten().tolist() == [10, 11, 12]


def test_the_future_is_never_seen():
    model = GPTModel(CONFIG, seed=0)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS)[:, :9], model(TOKENS[:, :9]))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_key_heads_equal_repeated_ones(kv_heads):
    config = replace(CONFIG, num_kv_heads=kv_heads)
    attention = SelfAttention(config).double()
    whole = SelfAttention(replace(CONFIG, num_kv_heads=4)).double()
    weight = attention.qkv.weight.view(4 + 2 * kv_heads, 8, 32)
    query, key, value = weight.split((4, kv_heads, kv_heads))
    repeated = [x.repeat_interleave(4 // kv_heads, 0) for x in (key, value)]
    with torch.no_grad():
        whole.qkv.weight.copy_(torch.cat((query, *repeated)).flatten(0, 1))
        whole.output.weight.copy_(attention.output.weight)
        x = torch.randn(2, 9, 32, dtype=torch.float64)
        torch.testing.assert_close(attention(x), whole(x))


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = []
    for place in (0, 5, 40):
        cos, sin = rotary_tables(CONFIG, torch.tensor([place, place + 3]))
        turned = [
            apply_rotary(x, cos[i : i + 1], sin[i : i + 1]) for i, x in enumerate((query, key))
        ]
        scores.append((turned[0] * turned[1]).sum())
    torch.testing.assert_close(scores[1], scores[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[2], scores[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_wavelengths_are_kept_stretched_or_between(kind):
    length = {} if kind == "linear" else {"original_length": 1024}  # which it does not read
    scaling = RopeScaling(kind=kind, factor=8.0, **length)
    config = replace(CONFIG, head_dim=64, rope_scaling=scaling)
    plain = replace(config, rope_scaling=None)
    # The angle at position 1 is the rate itself.
    rates = [torch.atan2(*reversed(rotary_tables(c, torch.tensor([1])))) for c in (config, plain)]
    ratio = (rates[1] / rates[0]).flatten()
    assert ratio.min() > 1 - 1e-4
    assert ratio.max() < 8 + 1e-4
    torch.testing.assert_close(ratio[-1], torch.tensor(8.0), rtol=1e-4, atol=0.0)
    expected = 8.0 if kind == "linear" else 1.0
    torch.testing.assert_close(ratio[0], torch.tensor(expected), rtol=1e-4, atol=0.0)


def test_a_path_that_cannot_is_refused():
    config = replace(CONFIG, attention_path="flex", attention_dropout=0.1)
    with pytest.raises(ValueError, match="attention_path 'flex' has no attention_dropout"):
        AttentionContext.build(config, TOKENS, torch.float32, training=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 4}, "a block is made with sliding_window 4, and the model .* None"),
        ({"rope_theta": 1e6}, r"rope_theta 1000000\.0, and the model .* 10000\.0"),
        ({"rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rope_scaling RopeScaling"),
        ({"positions": "none"}, "positions 'none', and the model .* 'rope'"),
    ],
)
def test_a_block_that_wants_another_context_is_refused(change, message):
    model = GPTModel(replace(CONFIG, num_layers=2), seed=0)
    model.blocks[1] = TransformerBlock(replace(CONFIG, **change))
    with pytest.raises(ValueError, match=message):
        model(TOKENS)
    # Its own width of the MLP, and positions that no block adds, are nobody's business.
    plain = replace(CONFIG, num_layers=2, positions="learned")
    model = GPTModel(plain, seed=0)
    for own in (replace(plain, ffn_size=8), replace(plain, positions="none")):
        model.blocks[1] = TransformerBlock(own)
        model(TOKENS)


def test_attention_alone_needs_a_batch():
    with pytest.raises(ValueError, match=r"x has shape \(5, 32\)"):
        SelfAttention(CONFIG)(torch.zeros(5, 32))


@pytest.mark.parametrize(
    ("capability", "dtype", "width", "path"),
    [
        ((9, 0), torch.bfloat16, 16, "varlen"),
        ((8, 0), torch.float16, 16, "varlen"),
        ((7, 5), torch.float16, 16, "flex"),
        ((9, 0), torch.float32, 16, "flex"),
        ((9, 0), torch.bfloat16, 8, "varlen"),
        ((9, 0), torch.float32, 8, "sdpa"),
    ],
)
def test_paths_on_cuda_follow_what_the_device_can(capability, dtype, width, path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    config = replace(CONFIG, head_dim=width)
    assert patterns._best_path(config, torch.device("cuda"), dtype, 0.0) == path
    assert patterns._best_path(config, torch.device("cuda"), dtype, 0.1) == "sdpa"
