"""What becomes of scores and logits: caps, sinks, slopes, biases."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F

from lamina.mesh import ParallelLayout
from lamina.models import (
    AttentionScores,
    GPTModel,
    MoEConfig,
    TransformerConfig,
    generate,
    linear_cross_entropy,
    pipeline,
)
from lamina.models.attention import GatedAttention, LatentAttention
from lamina.models.attention.kernels import Scored, over_positions
from lamina.models.moe.routing import choose_experts
from lamina_testing import device_type

from . import test_pipeline, test_tensor_parallel

LLAMA = test_tensor_parallel.LLAMA


def mixed_by_hand(query, key, value, part, sinks, slopes):
    """Attention of one head, one number after the other: lists of vectors."""
    results = []
    for at, q in enumerate(query):
        scores = [sum(x * y for x, y in zip(q, k, strict=True)) / 2.0 for k in key[: at + 1]]
        if part.softcap is not None:
            scores = [part.softcap * math.tanh(s / part.softcap) for s in scores]
        if part.linear_bias:
            scores = [s - slopes * (at - other) for other, s in enumerate(scores)]
        weights = [math.exp(s) for s in scores]
        total = sum(weights) + (math.exp(sinks) if part.sinks else 0.0)
        results.append([sum(w * v[i] for w, v in zip(weights, value, strict=False)) / total
                        for i in range(len(value[0]))])  # fmt: skip
    return results


PARTS = [
    AttentionScores(softcap=0.7),
    AttentionScores(sinks=True),
    AttentionScores(linear_bias=True),
    AttentionScores(softcap=0.7, sinks=True, linear_bias=True),
]


@pytest.mark.parametrize("part", PARTS)
def test_scores_are_those_written_out(part):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 6, 2, 4, dtype=torch.float64).unbind(0)
    index, sinks = torch.arange(6), torch.tensor([0.3, -1.2], dtype=torch.float64)
    slopes = torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64)  # of two heads
    assert torch.equal(AttentionScores(linear_bias=True).slopes(2, index.device).double(), slopes)
    pattern = over_positions(part, index, index, None, flex=False)
    assert isinstance(pattern, Scored)
    bound = pattern.with_heads(torch.stack((slopes, sinks), dim=1))
    mixed = bound(query, key, value, scale=0.5, dropout=0.0)
    for head in range(2):
        lists = (x[0, :, head].tolist() for x in (query, key, value))
        expected = mixed_by_hand(*lists, part, float(sinks[head]), float(slopes[head]))
        torch.testing.assert_close(mixed[0, :, head], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("part", PARTS)
@torch.no_grad()
def test_flex_attention_computes_the_same(part):
    """Its kernel trains on CUDA alone; here it runs forward."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 16, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    index, per_head = torch.arange(16), torch.rand(4, 2)
    runs = torch.tensor([0] * 5 + [1] * 11).expand(2, 16)
    both = [
        over_positions(part, index, index, 6, runs, runs, flex=flex).with_heads(per_head)(
            query, key, value, scale=0.3, dropout=0.0
        )
        for flex in (False, True)
    ]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12])
def test_slopes_are_those_of_press(heads):
    def slopes(number: int) -> list[float]:
        if math.log2(number).is_integer():
            return [2 ** (-8 / number * i) for i in range(1, number + 1)]
        near = 2 ** math.floor(math.log2(number))
        return slopes(near) + slopes(2 * near)[0::2][: number - near]

    made = AttentionScores(linear_bias=True).slopes(heads, torch.device("cpu"))
    torch.testing.assert_close(made, torch.tensor(slopes(heads)))


@dataclass(frozen=True, kw_only=True)
class Doubled(AttentionScores):
    def change(self, scores, distance, slope):
        return 2.0 * scores


def test_a_part_of_ones_own_changes_scores():
    plain, doubled = replace(LLAMA, attention_scale=0.5), replace(LLAMA, scores=Doubled(),
                                                                  attention_scale=0.25)  # fmt: skip
    tokens = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(*(GPTModel(c, seed=3)(tokens) for c in (plain, doubled)))


def test_a_cap_and_a_bias_of_logits_are_in_the_loss_and_its_gradients():
    torch.manual_seed(0)
    tensors = [torch.randn(*shape, dtype=torch.float64, requires_grad=True)
               for shape in ((10, 8), (32, 8), (32,))]  # fmt: skip
    labels = torch.randint(0, 30, (10,))
    labels[3] = -100
    hidden, weight, bias = tensors
    how = {"vocab_size": 30, "chunk": 4, "bias": bias, "softcap": 1.5}
    loss = linear_cross_entropy(hidden, weight, labels, **how)
    logits = 1.5 * torch.tanh(F.linear(hidden, weight, bias)[:, :30] / 1.5)
    expected = F.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss, expected)
    found = torch.autograd.grad(loss * 0.5, tensors)
    for ours, theirs in zip(found, torch.autograd.grad(expected * 0.5, tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


ENDS = replace(
    test_pipeline.CONFIG, embedding_norm=True, head_bias=True, logit_softcap=1.5,
    positions="learned", position_offset=2, post_norm="mlp",
    scores=AttentionScores(sinks=True, linear_bias=True),
)  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_ends_and_scores_train_in_stages_like_one_process(tied):
    config = replace(ENDS, tie_embeddings=tied)
    mesh = ParallelLayout(pp=2).build(device_type())
    runner = pipeline(test_pipeline.build(config, mesh), mesh, "1f1b", 4)
    test_pipeline.check_training(runner, mesh, config, None)


def test_experts_are_chosen_by_logits_where_the_config_says_so():
    """A bias of 0.9 beats a sigmoid's range, and not that of the logits."""
    logits, bias = torch.tensor([[4.0, 2.0, -3.0]]), torch.tensor([0.0, 0.0, 0.9])
    moe = MoEConfig(num_experts=3, top_k=2, scores="sigmoid", bias_rate=0.0, chosen_by="logits")
    assert choose_experts(logits, moe, bias).tolist() == [[0, 1]]
    assert choose_experts(logits.sigmoid(), moe, bias).tolist() == [[0, 2]]


REFUSED = [
    ({"scores": AttentionScores(sinks=True), "mla": LatentAttention(kv_lora_rank=8)},
     "beside LatentAttention, which leaves scores"),
    ({"post_norm": "both"}, "post_norm is 'both': it must be one of False, True, 'mlp'"),
    ({"qk_norm": "before"}, "qk_norm is 'before': it must be one of False, True, 'whole'"),
    ({"position_offset": 2}, "positions='rope' has no table"),
    ({"logit_softcap": -1.0}, "logit_softcap"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "words"), REFUSED)
def test_parts_that_do_not_fit_are_refused(change, words):
    shape = {"vocab_size": 61, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    with pytest.raises(ValueError, match=words):
        TransformerConfig(**shape, **change)
    with pytest.raises(ValueError, match="softcap is 0"):
        AttentionScores(softcap=0.0)


@pytest.mark.parametrize("change", [
    {"scores": AttentionScores(softcap=0.7, sinks=True, linear_bias=True), "sliding_window": 5},
    {"attention": GatedAttention(), "qk_norm": "after_rope", "embedding_norm": True},
    {"positions": "learned", "position_offset": 2, "head_bias": True, "logit_softcap": 0.7},
])  # fmt: skip
@torch.no_grad()
def test_tokens_are_generated_from_a_cache_as_without_one(change):
    model = GPTModel(replace(LLAMA, **change), seed=3).double().eval()
    tokens = torch.randint(0, 61, (2, 7))
    written = generate(model, tokens, 8, temperature=0.0)
    expected = tokens
    for _ in range(8):
        chosen = model(expected)[:, -1:].argmax(dim=-1)
        expected = torch.cat((expected, chosen), dim=1)
    assert torch.equal(written, expected)


def test_a_gate_of_zeros_halves_the_heads():
    tokens = torch.randint(0, 61, (2, 12))
    for each in ("element", "head"):
        gated = GPTModel(replace(LLAMA, attention=GatedAttention(each=each)), seed=3)
        plain = GPTModel(LLAMA, seed=3)
        plain.load_state_dict(gated.state_dict(), strict=False)
        with torch.no_grad():
            for block in (*gated.blocks, *plain.blocks):
                if hasattr(block.attention, "gate"):
                    block.attention.gate.weight.zero_()
                else:
                    block.attention.output.weight.mul_(0.5)
        torch.testing.assert_close(gated(tokens), plain(tokens))
