"""Inputs that torch would broadcast, cut short or read in another order are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lamina.models import (
    GPTModel,
    TransformerConfig,
    VocabParallelEmbedding,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from lamina.models.engine import ActivationFunction, OutputHead

CONFIG = TransformerConfig(
    vocab_size=20, hidden_size=16, num_layers=1, num_heads=2, max_sequence_length=8
)


@pytest.mark.parametrize(
    ("tokens", "labels", "options", "message"),
    [
        ((5,), (1,), {}, r"labels have shape \(1,\), hidden \(5, 8\)"),
        ((4,), (9,), {"chunk": 2}, r"labels have shape \(9,\), hidden \(4, 8\)"),
        ((2, 3), (2, 3), {}, r"hidden has shape \(2, 3, 8\): need \[tokens, hidden\]"),
        ((5,), (5,), {"chunk": -1}, "chunk is -1: it must be at least 1, or None"),
        ((5,), (5,), {"chunk": 0}, "chunk is 0: it must be at least 1, or None"),
        ((5,), (5,), {"vocab_size": 100}, "vocab_size is 100, weight has 64 rows over all ranks"),
        ((5,), (5,), {"vocab_size": 0}, "vocab_size is 0, weight has 64 rows over all ranks"),
    ],
)
def test_the_fused_loss_refuses_what_does_not_fit(tokens, labels, options, message):
    hidden, weight = torch.randn(*tokens, 8, requires_grad=True), torch.randn(64, 8)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(hidden, weight, torch.full(labels, 3), **options)


@pytest.mark.parametrize(
    ("tokens", "labels", "options", "message"),
    [
        ((), (), {}, r"labels have shape \(\), logits \(8,\).* at least one of tokens"),
        ((5,), (1,), {}, r"labels have shape \(1,\), logits \(5, 8\)"),
        ((5,), (5,), {"chunk": -1}, "chunk is -1: it must be at least 1, or None"),
        ((5,), (5,), {"chunk": 0}, "chunk is 0: it must be at least 1, or None"),
    ],
)
def test_the_loss_of_logits_refuses_what_does_not_fit(tokens, labels, options, message):
    with pytest.raises(ValueError, match=message):
        vocab_parallel_cross_entropy(torch.randn(*tokens, 8), torch.full(labels, 3), **options)


def test_a_table_has_a_row_for_every_id():
    with pytest.raises(ValueError, match="vocab_size is 100, the table has 64 rows"):
        VocabParallelEmbedding(64, 8, vocab_size=100)


@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_a_loss_is_a_mean_or_a_sum(reduction):
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    message = f"reduction is '{reduction}': it must be 'mean' or 'sum'"
    with pytest.raises(ValueError, match=message):
        GPTModel(CONFIG)(tokens, tokens, reduction=reduction)
    with pytest.raises(ValueError, match=message):
        OutputHead(CONFIG)(torch.randn(2, 5, 16), tokens, reduction)


@pytest.mark.parametrize("kind", ["rope", "learned"])
def test_positions_and_padding_fit_the_tokens(kind):
    model = GPTModel(replace(CONFIG, positions=kind))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    one_row = model(tokens, positions=torch.arange(5)[None])
    assert torch.equal(one_row, model(tokens, positions=torch.arange(5)))
    for positions in (torch.tensor([7]), torch.arange(5)[:, None], torch.arange(10).view(5, 2)):
        with pytest.raises(ValueError, match=r"positions have shape .*, tokens \(2, 5\)"):
            model(tokens, positions=positions)
    with pytest.raises(ValueError, match=r"padding_mask has shape \(5, 2\), tokens \(2, 5\)"):
        model(tokens, padding_mask=torch.zeros(5, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"padding_mask is torch\.int64: it must be torch\.bool"):
        model(tokens, padding_mask=tokens)
    beyond = torch.arange(4, 9)
    if kind == "rope":
        assert model(tokens, positions=beyond).isfinite().all()
        return
    for positions in (beyond, beyond.expand(2, 5)):
        with pytest.raises(ValueError, match=r"positions hold 8 .* must be 0 to 7"):
            model(tokens, positions=positions)


def test_an_activation_that_nobody_knows_is_refused():
    with pytest.raises(ValueError, match="activation is 'swoosh': it must be one of 'gelu'"):
        ActivationFunction("swoosh")
